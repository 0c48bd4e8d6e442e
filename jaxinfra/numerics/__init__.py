"""Precision policies and loss scaling; the only floor that names float dtypes."""
