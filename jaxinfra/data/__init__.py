"""Floor 7: text to packed, sharded, resumable batches."""
