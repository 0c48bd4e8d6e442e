"""Floor 2: precision policies and loss scaling; the only floor that names float dtypes."""
