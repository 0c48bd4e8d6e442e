"""The row kernel, which applies a formula such as a softmax to each row in one pass."""
