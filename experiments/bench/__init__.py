"""Benchmarks: ours beside the alternatives, in one process."""
