"""Compiled programs, read: buffers, collectives, matmuls and launches."""
