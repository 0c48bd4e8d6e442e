"""Attention and decoding on a mesh whose devices have whole sequences.

Attention over sequences that the context axis shards is in ``context.methods``.

Dims: B batch, T position, N query heads, K key/value heads, H head width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.config.model import GroupedAttentionConfig, MixerConfig
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.decode_layers import DecodedLayers, LayerWeights, decode_layers, decode_rows
from jaxinfra.ops.key_choice import KeyIndex
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
        index: KeyIndex | None = None,
    ) -> Float[Array, "B T N Hv"]:
        """Computes self-attention; the result is sharded as q."""
        place = self.placement
        q_spec = place.spec((axes.BATCH, None, axes.Q_HEADS, None))
        kv_spec = place.spec((axes.BATCH, None, axes.KV_HEADS, None))
        ids_spec = None if segment_ids_BT is None else place.spec((axes.BATCH, None))
        sinks_spec = None if sinks_N is None else place.spec((axes.Q_HEADS,))

        def local(q, k, v, ids, sinks, index) -> jax.Array:
            more = {} if index is None else {"index": index}
            return self.attend(q, k, v, config=config, segment_ids_BT=ids, sinks_N=sinks, **more)

        return place.on_each_device(
            local,
            in_specs=(q_spec, kv_spec, kv_spec, ids_spec, sinks_spec, place.spec((axes.BATCH,))),
            out_specs=q_spec,
            # A kernel does not say over which axes its results vary; nothing is summed over any.
            check_vma=False,
        )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, index)


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
        index: KeyIndex | None = None,
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

        def local(q, arrays, tables, layer, positions, sinks, index) -> jax.Array:
            pages = Pages(arrays=arrays, tables_BM=tables, layer=layer, format=form)
            more = {} if index is None else {"index": index}
            return self.decode(
                q, pages, config=config, positions_BT=positions, sinks_N=sinks, **more
            )

        in_specs = (
            q_spec,
            arrays_spec,
            None if tables_BM is None else rows_spec,
            None if pages.layer is None else place.spec(()),
            rows_spec,
            None if sinks_N is None else place.spec((axes.Q_HEADS,)),
            place.spec((axes.BATCH,)),
        )
        return place.on_each_device(
            local,
            in_specs=in_specs,
            out_specs=q_spec,
            check_vma=False,  # as above
        )(q_BTNH, pages.arrays, tables_BM, pages.layer, positions_BT, sinks_N, index)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedDecodeLayers:
    """Layers of a one-token step on a tensor axis: each device has its own heads and columns.

    The kernels write partial sums to one another, twice a layer: 4 D bytes of each part to each
    other device.
    """

    placement: Placement

    def __call__(
        self,
        x_BTD: jax.Array,
        layers: LayerWeights,
        pages: Pages,
        *,
        config: GroupedAttentionConfig,
        positions_BT: jax.Array,
        rope: tuple[jax.Array, jax.Array],
    ) -> DecodedLayers | None:
        """Computes all layers in one launch per device; None if the kernel cannot."""
        place, whole = self.placement, PartitionSpec()
        num_devices, ids = place.mesh.size, [device.id for device in place.mesh.devices.flat]
        if num_devices != place.mesh.shape[MeshAxis.TENSOR] or pages.tables_BM is None:
            return None
        if ids != [*range(num_devices)]:
            return None  # Mosaic GPU counts peers from the first device
        heads, hidden = ((None, None, dim) for dim in (axes.Q_HEADS, axes.MLP))
        specs: dict[str, Any] = dict(
            attention_norm=whole, qkv=place.spec(heads), out=place.spec((*heads[1:], None)),
            mlp_norm=whole, gate_up=place.spec(hidden), down=place.spec((*hidden[1:], None)),
        )  # fmt: skip
        arrays_spec = {
            each.name: place.spec((None, None, *each.dims))
            for each in config.cache.stored_as(pages.format).arrays
        }
        taken = []  # only inside it is known whether kernels take a device's shapes

        def local(x, layers, arrays, tables, positions, rope) -> DecodedLayers:
            pages_of_device = dataclasses.replace(pages, arrays=arrays, tables_BM=tables)
            given = (x, layers, pages_of_device)
            how: dict[str, Any] = dict(
                config=config, positions_BT=positions, rope=rope, axis=MeshAxis.TENSOR
            )
            found = decode_layers(*given, **how) or decode_rows(*given, **how)
            taken.append(found is not None)
            return found or (x, arrays)

        found = place.on_each_device(
            local,
            in_specs=(whole, LayerWeights(**specs), arrays_spec, whole, whole, whole),
            out_specs=(whole, arrays_spec),
            check_vma=False,  # as above
        )(x_BTD, layers, pages.arrays, jnp.asarray(pages.tables_BM), positions_BT, rope)
        return found if all(taken) else None
