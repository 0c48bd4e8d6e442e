"""Code that all ops share: device facts, errors, tuning tables, einsums with fp32 sums."""
