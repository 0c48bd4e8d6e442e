"""Worked plans: a question, the layouts that answer it, and the reasoning in figures."""
