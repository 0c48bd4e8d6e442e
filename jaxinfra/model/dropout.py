"""Dropout whose mask depends on a token's row and position, not on how the batch is sharded."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxinfra.config.model import Stack
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


def keys_of_stacks(
    key: jax.Array | None, stacks: Sequence[Stack]
) -> tuple[jax.Array | None, list[jax.Array | None]]:
    """Splits a key into the embedding's and each stack's, [repeats, pattern]; None if None."""
    if key is None:
        return None, [None] * len(stacks)
    sizes = [len(each.pattern) * each.repeats for each in stacks]
    embed_key, blocks_key = jax.random.split(key)
    layer_keys, begin, by_stack = jax.random.split(blocks_key, sum(sizes)), 0, []
    for each, size in zip(stacks, sizes, strict=True):
        by_stack.append(layer_keys[begin : begin + size].reshape(each.repeats, len(each.pattern)))
        begin += size
    return embed_key, by_stack
