"""Parts that kernels for Hopper GPUs share: numbers of the machine, tiles, the launch."""
