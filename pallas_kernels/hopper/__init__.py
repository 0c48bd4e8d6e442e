"""Building blocks shared by the kernels for Hopper GPUs: tiles, barriers, registers, the launch."""
