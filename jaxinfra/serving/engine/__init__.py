"""Runs many generation requests at once over one paged KV cache (continuous batching)."""
