"""Many requests at once over one paged cache."""
