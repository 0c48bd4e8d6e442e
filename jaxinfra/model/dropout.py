"""Dropout whose mask depends on a token's row and position, not on how the batch is sharded."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxinfra.model.execution import Place


def dropout(
    x_BT: Float[Array, "B T *rest"], *, rate: float, key: Key[Array, ""] | None, place: Place
) -> Float[Array, "B T *rest"]:
    """Zeroes elements of [B, T, ...] with probability ``rate`` and scales the rest (Srivastava
    et al. 2014); identity without a key.

    Each token's key is derived from its row in the batch and its position in the sequence. So the
    result does not depend on how the batch is sharded, or on the order of tokens in memory.

    Args:
        place: object that returns the rows' indices in the batch, and their tokens' positions.
    """
    if key is None or rate == 0.0:
        return x_BT
    rows_B = place.first_row(x_BT.shape[0]) + jnp.arange(x_BT.shape[0])
    row_keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)
    of_places = jax.vmap(jax.random.fold_in, (None, 0))
    keys_BT = jax.vmap(of_places, (0, None))(row_keys_B, place.token_positions(x_BT.shape[1]))

    def keeps(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1.0 - rate, x_BT.shape[2:])

    kept_BT = jax.vmap(jax.vmap(keeps))(keys_BT)
    return jnp.where(kept_BT, x_BT / (1.0 - rate), jnp.zeros_like(x_BT))
