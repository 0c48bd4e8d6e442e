"""Floor 8: the pure step and the impure loop around it."""
