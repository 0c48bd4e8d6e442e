"""Examination of a machine: each reading with a rule and a remedy."""
