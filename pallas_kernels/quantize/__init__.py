"""Casts to 8-bit floats with fp32 scales."""

from .api import quantize as quantize
from .api import quantize_both_ways as quantize_both_ways
