"""Checkpoints of runs, and files that hold a model: read, written and converted."""
