"""Benchmarks of training: ours beside the alternatives, in one process."""
