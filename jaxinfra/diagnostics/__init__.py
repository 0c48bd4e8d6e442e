"""Floor 9: reading compiled programs and traces."""
