"""Grouped products whose rows have the same bits however many there are, on any device.

They are those of ``xla`` in blocks of one number of rows. Gradients may sum in any order.
"""

import functools

from . import xla
from .xla import input_gradient as input_gradient
from .xla import scaled_product as scaled_product
from .xla import weight_gradient as weight_gradient

BLOCK = 32

product = functools.partial(xla.product, block=BLOCK)
swiglu = functools.partial(xla.swiglu, block=BLOCK)
