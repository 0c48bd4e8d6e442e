"""Floor 1: frozen dataclasses that say what to compute. Presets are functions."""
