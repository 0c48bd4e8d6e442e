"""Faults that are injected into small runs of the user's own config, with what each one cost."""
