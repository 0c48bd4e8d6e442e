"""Dropout (Srivastava et al. 2014)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxinfra.model.execution import Place


def dropout(
    x_BT: Float[Array, "B T *rest"], *, rate: float, key: Key[Array, ""] | None, place: Place
) -> Float[Array, "B T *rest"]:
    """Zeroes elements of [B, T, ...] with probability ``rate`` and scales the rest; identity
    without a key.

    Each token has a key of its own, by its row in the batch and its position in the sequence. So a
    part of a batch, or a sequence in another order, is treated as within the whole.

    Args:
        place: gives the rows' indices in the batch, and their tokens' positions.
    """
    if key is None or rate == 0.0:
        return x_BT
    rows_B = place.first_row(x_BT.shape[0]) + jnp.arange(x_BT.shape[0])
    row_keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)
    of_places = jax.vmap(jax.random.fold_in, (None, 0))
    keys_BT = jax.vmap(of_places, (0, None))(row_keys_B, place.places(x_BT.shape[1]))

    def keeps(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1.0 - rate, x_BT.shape[2:])

    kept_BT = jax.vmap(jax.vmap(keeps))(keys_BT)
    return jnp.where(kept_BT, x_BT / (1.0 - rate), jnp.zeros_like(x_BT))
