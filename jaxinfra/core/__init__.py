"""Axis names, errors, and what every other floor may assume."""
