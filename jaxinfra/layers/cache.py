"""The key/value cache of one attention layer, and of layers stacked.

Dims: B batch, S cache slot (= position), K key/value heads, H head width, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Keys and values of past positions: slot s holds position s. [B, S, K, H] each.

    bytes = 2 * batch * slots * layers * kv_heads * head_dim * itemsize over all layers.
    """

    k_BSKH: jax.Array
    v_BSKH: jax.Array

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> "LayerCache":
        """The cache with new keys and values at their positions.

        Positions at or beyond the cache's end are dropped, not wrapped: the caller bounds lengths.
        """
        rows_B1 = jnp.arange(k_BTKH.shape[0])[:, None]

        def put(cache: jax.Array, new: jax.Array) -> jax.Array:
            return cache.at[rows_B1, positions_BT].set(new.astype(cache.dtype), mode="drop")

        return LayerCache(k_BSKH=put(self.k_BSKH, k_BTKH), v_BSKH=put(self.v_BSKH, v_BTKH))


def read_layer(stacked: LayerCache, index: jax.Array) -> LayerCache:
    """One layer of a cache with a leading L dim."""
    return jax.tree.map(
        lambda x_LBSKH: jax.lax.dynamic_index_in_dim(x_LBSKH, index, keepdims=False), stacked
    )


def write_layer(stacked: LayerCache, layer: LayerCache, index: jax.Array) -> LayerCache:
    """The stacked cache with one layer replaced, in place where its buffer may be reused."""
    return jax.tree.map(
        lambda x_LBSKH, new_BSKH: jax.lax.dynamic_update_index_in_dim(x_LBSKH, new_BSKH, index, 0),
        stacked,
        layer,
    )
