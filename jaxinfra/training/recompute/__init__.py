"""Recomputation: chooses, for a memory budget, which values are kept for the backward pass and
which it computes again.
"""
