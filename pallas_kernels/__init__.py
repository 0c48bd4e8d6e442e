"""Kernels for JAX on Hopper GPUs, with portable references. Imports nothing but JAX."""
