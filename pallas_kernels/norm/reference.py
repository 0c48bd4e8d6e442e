"""The formula in plain jnp; the contract of every implementation.

Dims: C column, the last.
"""

import jax
import jax.numpy as jnp


def rms_norm_reference(x: jax.Array, scale_C: jax.Array, *, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x**2) + epsilon) * scale`` over the last dim (arXiv 1910.07467).

    In fp32, rounded to the dtype of ``x`` at the end.
    """
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    scale = jnp.expand_dims(scale_C.astype(jnp.float32), range(x.ndim - 1))
    return (wide * root * scale).astype(x.dtype)
