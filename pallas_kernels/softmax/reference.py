"""The formula in plain jnp; the contract of every implementation.

Dims: C column, the last.
"""

import jax
import jax.numpy as jnp


def softmax_reference(x: jax.Array) -> jax.Array:
    """``exp(x - max) / sum`` over the last dim in fp32, rounded to the dtype of ``x`` at the end.

    A row of nothing but -inf, or with inf or NaN in it, is NaN.
    """
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def softmax_gradient_reference(y: jax.Array, d_y: jax.Array) -> jax.Array:
    """``y * (d_y - sum(y * d_y))`` in fp32, rounded to the dtype of ``y``, the softmax."""
    dtype = y.dtype
    y, d_y = y.astype(jnp.float32), d_y.astype(jnp.float32)
    return (y * (d_y - jnp.sum(y * d_y, axis=-1, keepdims=True))).astype(dtype)
