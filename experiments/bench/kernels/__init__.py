"""Benchmarks of kernels: ours beside the alternatives, in one process."""
