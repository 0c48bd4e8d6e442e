"""Matmuls of 8-bit floats with scales a tensor, a row or a block."""

from .api import scaled_matmul as scaled_matmul
