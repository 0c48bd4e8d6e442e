"""Optimizer chains and learning-rate schedules."""
