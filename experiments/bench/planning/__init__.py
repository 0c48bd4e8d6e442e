"""Benchmarks of planning: ours beside the alternatives, in one process."""
