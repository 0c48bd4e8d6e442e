"""Casts to 8-bit floats with fp32 scales."""

from .api import quantize as quantize
from .both_ways import quantize_both_ways as quantize_both_ways
from .both_ways import quantize_swiglu as quantize_swiglu
from .both_ways import quantize_swiglu_gradient as quantize_swiglu_gradient
