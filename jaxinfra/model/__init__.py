"""The decoder: its layers, what it caches, its adapters, and the forms in which it runs."""
