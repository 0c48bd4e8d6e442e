"""RMSNorm over rows."""
