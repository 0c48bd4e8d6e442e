"""Frozen dataclasses that say what to compute. Presets are functions."""
