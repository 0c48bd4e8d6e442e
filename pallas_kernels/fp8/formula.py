"""Formulas of 8-bit quantization, SwiGLU and its gradient, element by element in fp32.

    scale = max(largest finite |x|, LEAST) / LARGEST(dtype),   value = round(x / scale)

- A finite element is rounded to nearest, ties to even. It saturates where its quotient exceeds the
  format's range; below half the least denormal it becomes 0.
- Infinities and NaN become NaN in every format, so that they are not hidden as large numbers. They
  do not affect the scale, so the block's other elements keep their precision.
- A block of zeros, or of elements below ``LEAST``, has the scale of ``LEAST``, so that no scale is
  0 and no inverse of a scale is infinite.
- A power-of-two scale is the least one that keeps the largest element in range. Multiplying by it
  is exact; it is computed from exponent bits, without a logarithm.

SwiGLU and its gradient have two versions, for XLA and for kernels:

    hidden = silu(gate) up
    d_gate = d up s (1 + gate (1 - s)),   d_up = d silu(gate),   s = sigmoid(gate)

Kernels use two hardware functions per element, 2**x and 1 / sqrt(x): the square of the latter is
the reciprocal, for which a division takes a dozen instructions. Both have a relative error of
2**-22. The rounded argument of 2**x adds the gate's magnitude times 2**-24. All this is far below
bf16's rounding, 2**-9.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

LEAST = 2.0**-100
"""Least maximum that a block's scale is computed from. Products of two smaller elements are 0 in
fp32 anyway."""

# The largest numbers of e4m3 and e5m2 are 1.75 * 2**8 and 1.75 * 2**15.
_LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}
_FRACTION_OF_LARGEST = 0x600000  # 0.75 in 23 bits
_FRACTION_BITS, _EXPONENTS = 23, 254
_LOG2E = math.log2(math.e)


def largest_of(dtype: jnp.dtype) -> float:
    """Returns the largest finite number of an 8-bit format."""
    return 1.75 * 2.0 ** _LARGEST_EXPONENT[dtype.name]


def magnitude(x: jax.Array) -> jax.Array:
    """Computes ``|x|`` of float32 elements, with 0 for infinities and NaN."""
    size = jnp.abs(x)
    return jnp.where(size < jnp.inf, size, 0.0)


def scale_and_inverse(
    largest: jax.Array, dtype: jnp.dtype, *, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the scale that maps ``largest`` to the format's largest number, and its inverse."""
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
    """Casts ``x * inverse`` from float32 to an 8-bit format; ``inverse`` is one over the scale."""
    top = largest_of(dtype)
    scaled = jnp.clip(x * inverse, -top, top)
    return jnp.where(jnp.abs(x) < jnp.inf, scaled, jnp.nan).astype(dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
    """Computes ``silu(gate) * up`` by JAX's own functions."""
    return (jax.nn.silu(gate) * up,)


def swiglu_gradient(
    gate: jax.Array, up: jax.Array, d_hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of gate and up of SwiGLU by JAX's own rules."""
    return jax.vjp(swiglu, gate, up)[1]((d_hidden,))


def swiglu_in_kernel(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
    """Computes ``silu(gate) * up`` with the instructions that kernels use."""
    return (gate * _sigmoid(gate) * up,)


def gradient_in_kernel(
    gate: jax.Array, up: jax.Array, d_hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of gate and up of SwiGLU with kernels' instructions."""
    sigmoid = _sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return d_hidden * up * slope, d_hidden * (gate * sigmoid)


def same(x: jax.Array) -> tuple[jax.Array]:
    """Returns x unchanged: the element-wise function of a plain cast."""
    return (x,)


def _sigmoid(x: jax.Array) -> jax.Array:
    root = lax.rsqrt(1.0 + jnp.exp2(x * -_LOG2E))
    return root * root
