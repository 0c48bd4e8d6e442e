"""The 8-bit format of operands, and the scale that brings a block of numbers into it."""

import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
LEAST = 2.0**-40
"""A block whose largest element is smaller counts as having this one: no scale is 0, and products
of three scales stay normal numbers."""
