"""The kernel over rows, which computes a formula of each row in one pass over memory."""
