"""Recomputation: which values the backward pass keeps and which it computes again, by a memory
budget.
"""
