"""Pictures of the documentation, drawn from the code they explain."""
