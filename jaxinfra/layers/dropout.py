"""Dropout (Srivastava et al. 2014)."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, *, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability ``rate`` and scales the rest; identity without a key."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))
