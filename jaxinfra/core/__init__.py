"""Floor 0: axis names, errors, and what every other floor may assume."""
