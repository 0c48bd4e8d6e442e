"""Grouped products by Mosaic GPU kernels for Hopper, with the same functions as ``xla``."""

from .calls import input_gradient as input_gradient
from .calls import ordered_product as ordered_product
from .calls import product as product
from .calls import scaled_product as scaled_product
from .calls import scaled_unsupported as scaled_unsupported
from .calls import swiglu as swiglu
from .calls import unsupported as unsupported
from .calls import weight_gradient as weight_gradient
