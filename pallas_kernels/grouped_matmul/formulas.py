"""Element-wise formulas in fp32: SwiGLU of two products, its gradient, and dequantization.

Dims: M row, G group, K contracted, N column, J blocks of 128 of K, I blocks of 128 of N.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.scales import Scaling, spread


class SwigluResults(NamedTuple):
    """The gated product silu(gate) * up, and gate and up if kept, [M, N] each."""

    out: Any
    gate: Any = None
    up: Any = None


def swiglu_of(gate: jax.Array, up: jax.Array, *, dtype: jnp.dtype, keep: bool) -> SwigluResults:
    """Computes ``silu(gate) * up`` from fp32 products, rounded to ``dtype`` once."""
    out = (jax.nn.silu(gate) * up).astype(dtype)
    return SwigluResults(out, gate.astype(dtype), up.astype(dtype)) if keep else SwigluResults(out)


def swiglu_gradient(
    gate: jax.Array, up: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the cotangents of gate and up from that of ``silu(gate) * up``."""
    of, dtype = jnp.float32, gate.dtype
    sigmoid = jax.nn.sigmoid(gate.astype(of))
    silu = gate.astype(of) * sigmoid
    slope = sigmoid * (1.0 + gate.astype(of) * (1.0 - sigmoid))
    d_out = d_out.astype(of)
    return (d_out * up.astype(of) * slope).astype(dtype), (d_out * silu).astype(dtype)


def dequantized_operands(
    a_MK: jax.Array, b_GNK: jax.Array, a_scale_JM: jax.Array, b_scale_GJI: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Multiplies 8-bit a and b by their block scales; returns both in fp32."""
    of_a = spread(Scaling.BLOCK_OF_ROW, a_scale_JM, *a_MK.shape)
    of_b = spread(Scaling.BLOCK, b_scale_GJI, *b_GNK.shape[1:])
    return a_MK.astype(jnp.float32) * of_a, b_GNK.astype(jnp.float32) * of_b
