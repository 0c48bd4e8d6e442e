"""Where a compiled program's memory goes."""
