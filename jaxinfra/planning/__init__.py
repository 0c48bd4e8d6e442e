"""Floor 9: what fits, which mesh, how fast."""
