"""RMSNorm and LayerNorm in plain jnp, which every implementation must match.

Dims: C column, the last.
"""

import jax
import jax.numpy as jnp


def rms_norm_reference(x: jax.Array, scale_C: jax.Array, *, epsilon: float) -> jax.Array:
    """Computes ``x / sqrt(mean(x**2) + epsilon) * scale`` over the last dim (arXiv 1910.07467).

    In fp32, rounded to the dtype of ``x`` at the end.
    """
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * root * _columns(scale_C, x)).astype(x.dtype)


def layer_norm_reference(
    x: jax.Array, scale_C: jax.Array, bias_C: jax.Array | None = None, *, epsilon: float
) -> jax.Array:
    """Computes LayerNorm over the last dim: ``(x - mean) / sqrt(variance + epsilon) * scale +
    bias`` (arXiv 1607.06450).

    In fp32, rounded to the dtype of ``x`` at the end.
    """
    wide = x.astype(jnp.float32)
    apart = wide - jnp.mean(wide, axis=-1, keepdims=True)
    root = jax.lax.rsqrt(jnp.mean(apart * apart, axis=-1, keepdims=True) + epsilon)
    y = apart * root * _columns(scale_C, x)
    return (y if bias_C is None else y + _columns(bias_C, x)).astype(x.dtype)


def _columns(vector_C: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.expand_dims(vector_C.astype(jnp.float32), range(x.ndim - 1))
