"""Explanations of steps, runs, memory and machines, from traces and recordings."""
