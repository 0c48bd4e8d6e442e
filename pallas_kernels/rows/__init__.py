"""Kernels over rows: one formula, in whichever of four forms suits the length of the rows."""
