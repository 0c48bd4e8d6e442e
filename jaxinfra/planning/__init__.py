"""What fits, which mesh, how fast, and how far the answers are from measurements."""
