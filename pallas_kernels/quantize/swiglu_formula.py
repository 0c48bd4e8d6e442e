"""SwiGLU and its gradient, number by number in fp32: as XLA computes them, and as kernels do.

    hidden = silu(gate) up
    d_gate = d up s (1 + gate (1 - s)),   d_up = d silu(gate),   s = sigmoid(gate)

Kernels take two hardware functions a number, 2**x and 1 / sqrt(x): the root's square is the
reciprocal, where a division takes a dozen instructions. Both are right to 2**-22, as is the
exponent's product up to a gate's magnitude times 2**-24, far below a rounding to bf16, 2**-9.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

_LOG2E = math.log2(math.e)


def swiglu(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
    """The hidden value, by JAX's own functions."""
    return (jax.nn.silu(gate) * up,)


def swiglu_gradient(
    gate: jax.Array, up: jax.Array, d_hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of gate and of up, by JAX's own rules."""
    return jax.vjp(swiglu, gate, up)[1]((d_hidden,))


def swiglu_in_kernel(gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
    """``swiglu`` for a kernel."""
    return (gate * _sigmoid(gate) * up,)


def gradient_in_kernel(
    gate: jax.Array, up: jax.Array, d_hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``swiglu_gradient`` for a kernel."""
    sigmoid = _sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return d_hidden * up * slope, d_hidden * (gate * sigmoid)


def same(x: jax.Array) -> tuple[jax.Array]:
    """Nothing is computed of a matrix that is cast as it is."""
    return (x,)


def _sigmoid(x: jax.Array) -> jax.Array:
    root = lax.rsqrt(1.0 + jnp.exp2(x * -_LOG2E))
    return root * root
