"""Floor 7: verified, asynchronous, atomic checkpoints."""
