"""Text to packed, sharded, resumable batches."""
