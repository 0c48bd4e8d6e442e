"""Queries in blocks, so that the scores of only one block exist at a time.

Dims: B batch, T query.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_BLOCK = 128


def in_query_blocks(compute: Callable[[Any], jax.Array], queries: Any) -> jax.Array:
    """Computes a function of each query, at most 128 queries at a time, one block after another.

    Returns [B, T, ...].

    Args:
        compute: function of a tree like ``queries`` with another T; it has to be finite at zeros,
            with which the last block is filled up.
        queries: tree of arrays [B, T, ...].
    """
    batch, length = jax.tree.leaves(queries)[0].shape[:2]
    if length <= _BLOCK:
        return compute(queries)
    num_blocks = -(-length // _BLOCK)

    def blocks(x: jax.Array) -> jax.Array:
        ends = [(0, 0), (0, num_blocks * _BLOCK - length), *[(0, 0)] * (x.ndim - 2)]
        return jnp.moveaxis(jnp.pad(x, ends).reshape(batch, num_blocks, _BLOCK, *x.shape[2:]), 1, 0)

    out = jnp.moveaxis(jax.lax.map(compute, jax.tree.map(blocks, queries)), 0, 1)
    return out.reshape(batch, -1, *out.shape[3:])[:, :length]
