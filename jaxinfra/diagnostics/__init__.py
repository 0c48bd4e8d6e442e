"""Floor 9: traces, explained."""
