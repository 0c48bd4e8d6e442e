"""Pictures of the documentation, plotted from the code they explain."""
