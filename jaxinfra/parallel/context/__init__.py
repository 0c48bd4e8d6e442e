"""Context parallelism: one sequence over several devices, by ring, all-to-all or all-gather."""
