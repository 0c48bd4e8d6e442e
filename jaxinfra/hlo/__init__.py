"""Readers of compiled programs: buffers, collectives, matmuls and launches."""
