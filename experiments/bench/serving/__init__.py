"""Benchmarks of serving: ours beside the alternatives, in one process."""
