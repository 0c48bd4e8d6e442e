"""Code that every op shares: device facts, errors, tuned tables."""
