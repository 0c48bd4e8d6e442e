"""Softmax, log-softmax and logsumexp in plain jnp, which every implementation must match.

Dims: C column, the last.
"""

import jax
import jax.numpy as jnp


def softmax_reference(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Computes ``exp(x - max) / sum`` over the last dim in fp32, rounded to the dtype of ``x``.

    Columns where ``where`` is False are left out and give 0. In the other columns, a row is NaN if
    it holds only -inf, or any inf or NaN.
    """
    wide = x.astype(jnp.float32)
    if where is None:
        return jax.nn.softmax(wide, axis=-1).astype(x.dtype)
    y = jax.nn.softmax(jnp.where(where, wide, -jnp.inf), axis=-1)
    return jnp.where(where, y, 0.0).astype(x.dtype)


def softmax_gradient_reference(y: jax.Array, d_y: jax.Array) -> jax.Array:
    """Computes the gradient ``y * (d_y - sum(y * d_y))`` in fp32, rounded to ``y``'s dtype.

    Masked columns have a y of 0 and so a gradient of 0.
    """
    dtype = y.dtype
    y, d_y = y.astype(jnp.float32), d_y.astype(jnp.float32)
    return (y * (d_y - jnp.sum(y * d_y, axis=-1, keepdims=True))).astype(dtype)


def log_softmax_reference(x: jax.Array) -> jax.Array:
    """Computes ``x - max - log(sum(exp(x - max)))`` over the last dim in fp32, rounded once."""
    return jax.nn.log_softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def logsumexp_reference(x: jax.Array) -> jax.Array:
    """Computes ``log(sum(exp(x)))`` over the last dim in fp32."""
    return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)
