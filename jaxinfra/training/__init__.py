"""The pure step and the impure loop around it."""
