"""Faults, injected into small runs of the user's own config, and what was lost by each."""
