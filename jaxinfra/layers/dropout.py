"""Dropout (Srivastava et al. 2014)."""

import jax
import jax.numpy as jnp


def dropout(
    x: jax.Array, *, rate: float, key: jax.Array | None, first_row: jax.Array | int = 0
) -> jax.Array:
    """Zeroes elements with probability ``rate`` and scales the rest; identity without a key.

    Each row of the leading dim draws from a key of its own, so that a part of a batch is treated as
    within the whole.

    Args:
        first_row: number of x's first row in the whole batch.
    """
    if key is None or rate == 0.0:
        return x
    rows = first_row + jnp.arange(x.shape[0])
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(row_keys)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros_like(x))
