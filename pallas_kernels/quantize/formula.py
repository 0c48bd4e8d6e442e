"""What quantization computes, number by number: shared by all implementations.

    scale = max(largest finite |x|, LEAST) / LARGEST(dtype),   value = round(x / scale)

- A finite element is rounded to the nearest, ties to even, and saturates where a given scale leaves
  it outside the format; below half the least denormal it is 0.
- An infinity and a NaN become NaN, whatever the format: they are not hidden as large numbers. They
  do not enter the scale, so their neighbours keep their digits.
- A block of zeros, or of elements below ``LEAST``, has the scale of ``LEAST``: no scale is 0 and
  the inverse of none is infinite.
- A power of two is the least that keeps the largest element inside the format. Multiplying by it is
  exact, and it is found in the bits, without a logarithm.
"""

import jax
import jax.numpy as jnp
from jax import lax

LEAST = 2.0**-100
"""Products of two scales, 2**-200 and less, are 0 in fp32, as are the products of such elements."""

# The largest numbers of e4m3 and e5m2 are 1.75 * 2**8 and 1.75 * 2**15.
_LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}
_FRACTION_OF_LARGEST = 0x600000  # 0.75 in 23 bits
_FRACTION_BITS, _EXPONENTS = 23, 254


def largest_of(dtype: jnp.dtype) -> float:
    """The largest finite number of an 8-bit format."""
    return 1.75 * 2.0 ** _LARGEST_EXPONENT[dtype.name]


def magnitude(x: jax.Array) -> jax.Array:
    """``|x|`` of float32, 0 where it is not finite."""
    size = jnp.abs(x)
    return jnp.where(size < jnp.inf, size, 0.0)


def scale_and_inverse(
    largest: jax.Array, dtype: jnp.dtype, *, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """The scale that brings ``largest``, finite float32, to the format's, and its inverse."""
    bounded = jnp.maximum(largest, LEAST)
    if not power_of_two:
        top = largest_of(dtype)
        return bounded * (1.0 / top), top / bounded
    bits = lax.bitcast_convert_type(bounded, jnp.int32)
    exceeds = (bits & ((1 << _FRACTION_BITS) - 1)) > _FRACTION_OF_LARGEST
    exponent = (bits >> _FRACTION_BITS) - _LARGEST_EXPONENT[dtype.name] + exceeds.astype(jnp.int32)
    scale, inverse = exponent << _FRACTION_BITS, (_EXPONENTS - exponent) << _FRACTION_BITS
    return (
        lax.bitcast_convert_type(scale, jnp.float32),
        lax.bitcast_convert_type(inverse, jnp.float32),
    )


def cast(x: jax.Array, inverse: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x * inverse`` of float32 in an 8-bit format."""
    top = largest_of(dtype)
    scaled = jnp.clip(x * inverse, -top, top)
    return jnp.where(jnp.abs(x) < jnp.inf, scaled, jnp.nan).astype(dtype)
