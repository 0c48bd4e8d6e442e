"""Files that hold a model: read, written and converted; a run's checkpoints are `checkpoint`'s."""
