"""Loading, generating and evaluating."""
