"""What a machine says of itself, each statement with a rule and a remedy."""
