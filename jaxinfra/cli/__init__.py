"""Floor 10: parse, call one function, print."""
