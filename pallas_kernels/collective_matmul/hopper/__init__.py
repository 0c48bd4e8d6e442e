"""Collective matmuls by Mosaic GPU kernels for Hopper, with the same functions as ``reference``."""

from .calls import all_gather_product as all_gather_product
from .calls import product_reduce_scatter as product_reduce_scatter
