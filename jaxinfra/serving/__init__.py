"""Floor 8: loading, generating and evaluating."""
