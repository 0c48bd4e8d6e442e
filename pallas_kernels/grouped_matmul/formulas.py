"""The gated product's element-wise part and its gradient, in fp32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class SwigluResults(NamedTuple):
    """[M, N] each: silu(gate) * up, and what its gradient needs."""

    out: Any
    gate: Any = None
    up: Any = None


def swiglu_of(gate: jax.Array, up: jax.Array, *, dtype: jnp.dtype, keep: bool) -> SwigluResults:
    """Of fp32 products, rounded to ``dtype`` once."""
    out = (jax.nn.silu(gate) * up).astype(dtype)
    return SwigluResults(out, gate.astype(dtype), up.astype(dtype)) if keep else SwigluResults(out)


def swiglu_gradient(
    gate: jax.Array, up: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of gate and up, in their dtype."""
    of, dtype = jnp.float32, gate.dtype
    sigmoid = jax.nn.sigmoid(gate.astype(of))
    silu = gate.astype(of) * sigmoid
    slope = sigmoid * (1.0 + gate.astype(of) * (1.0 - sigmoid))
    d_out = d_out.astype(of)
    return (d_out * up.astype(of) * slope).astype(dtype), (d_out * silu).astype(dtype)
