"""Floor 5: one decoder for all architectures."""
