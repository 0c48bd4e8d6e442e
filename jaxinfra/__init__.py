"""One JAX/XLA system for training and serving large language models on NVIDIA GPUs."""
