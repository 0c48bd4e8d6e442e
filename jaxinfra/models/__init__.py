"""One decoder for all architectures."""
