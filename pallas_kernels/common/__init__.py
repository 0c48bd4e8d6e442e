"""What every op shares: device facts, errors, timing, tuned tables."""
