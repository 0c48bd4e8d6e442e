"""Exact attention in linear memory: reference, portable and Hopper implementations."""
