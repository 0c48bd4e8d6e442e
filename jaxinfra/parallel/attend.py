"""Attention and decoding on a mesh whose devices have whole sequences.

Attention over sequences that the context axis shards is in ``context.methods``.

Dims: B batch, T position, N query heads, K key/value heads, H head width.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.model import MixerConfig
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedAttention:
    """Attention on a mesh: each device computes its own rows and heads without communication.

    The compiler cannot partition kernels, which are custom calls. So they run in a ``shard_map``
    with the placement's sharding of rows and heads.
    """

    placement: Placement
    attend: Callable[..., jax.Array]  # attention on one device, as ``ops.attention.attention``

    def __call__(
        self,
        q_BTNH: Float[Array, "B T N H"],
        k_BTKH: Float[Array, "B T K H"],
        v_BTKH: Float[Array, "B T K Hv"],
        *,
        config: MixerConfig,
        segment_ids_BT: Int[Array, "B T"] | None,
        sinks_N: Float[Array, "N"] | None = None,
    ) -> Float[Array, "B T N Hv"]:
        """Computes self-attention; the result is sharded as q."""
        place = self.placement
        q_spec = place.spec((axes.BATCH, None, axes.Q_HEADS, None))
        kv_spec = place.spec((axes.BATCH, None, axes.KV_HEADS, None))
        ids_spec = None if segment_ids_BT is None else place.spec((axes.BATCH, None))
        sinks_spec = None if sinks_N is None else place.spec((axes.Q_HEADS,))

        def local(q, k, v, ids, sinks) -> jax.Array:
            return self.attend(q, k, v, config=config, segment_ids_BT=ids, sinks_N=sinks)

        return place.on_each_device(
            local,
            in_specs=(q_spec, kv_spec, kv_spec, ids_spec, sinks_spec),
            out_specs=q_spec,
            # A kernel does not say over which axes its results vary; nothing is summed over any.
            check_vma=False,
        )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedDecode:
    """Attention to a KV cache on a mesh: each device reads its own heads, without communication.

    A contiguous cache is sharded over the batch as its rows are. A pool of pages is replicated over
    the data axes, since any row may read any page.
    """

    placement: Placement
    decode: Callable[..., jax.Array]  # on one device, as ``ops.cached_attention.cached_attention``

    def __call__(
        self,
        q_BTNH: jax.Array,
        pages: Pages,
        *,
        config: MixerConfig,
        positions_BT: jax.Array,
        sinks_N: jax.Array | None = None,
    ) -> jax.Array:
        """Computes attention to the cache; the result is sharded as q."""
        place, tables_BM = self.placement, pages.tables_BM
        q_spec = place.spec((axes.BATCH, None, axes.Q_HEADS, None))
        rows_spec = place.spec((axes.BATCH, None))
        leading = (None, axes.BATCH, None) if tables_BM is None else (None, None)
        arrays_spec = {
            each.name: place.spec((*leading, *each.dims))
            for each in config.cache.stored_as(pages.format).arrays
        }
        form = pages.format

        def local(q, arrays, tables, layer, positions, sinks) -> jax.Array:
            pages = Pages(arrays=arrays, tables_BM=tables, layer=layer, format=form)
            return self.decode(q, pages, config=config, positions_BT=positions, sinks_N=sinks)

        in_specs = (
            q_spec,
            arrays_spec,
            None if tables_BM is None else rows_spec,
            None if pages.layer is None else place.spec(()),
            rows_spec,
            None if sinks_N is None else place.spec((axes.Q_HEADS,)),
        )
        return place.on_each_device(
            local,
            in_specs=in_specs,
            out_specs=q_spec,
            check_vma=False,  # as above
        )(q_BTNH, pages.arrays, tables_BM, pages.layer, positions_BT, sinks_N)
