"""Attention over a sequence sharded over the context axis: Ulysses, gathered keys, or ``ring``.

Ulysses (Jacobs et al. 2023) shards heads instead of tokens while attention runs. An all-to-all
gives each of P devices N/P heads of the whole sequence. Attention is local, by any implementation,
and a second all-to-all restores the sharding by tokens. P must divide the key/value heads of a
tensor shard. Bytes per device: (2 N + 2 K) t H b (P-1)/P forward, as many backward. The ring sends
2 K t H b (P-1), which is more if P > (N + K)/K. No computation of the layer hides the all-to-alls.

Gathered keys (Llama 3, section 3.3.2): each device has all keys and values, and its own queries.
Kernels are few and large, but all keys must fit in memory, and no computation hides the all-gather.
The keys before a chunk are one unmasked part, of another length on each device; the chunk's own
keys are causal. Both parts merge by logsumexp. Bytes per device: 2 (P-1) t K H b to gather keys
and values, as many to reduce their gradients.

Latent attention gathers latents, and each device rebuilds from them the keys and values of its
heads. In DeepSeek-V3 a token's latent and rotated key are 576 numbers, its keys and values 40,960:
a seventieth is sent. In return, every device projects every key. That costs 2 R (Hk + Hv) FLOPs
per key and head, against (Hk + Hv) t of attention: little if a device has more tokens than the
latent has numbers. Bytes per device: (P-1) t (R + Hp) b.

Dims: B batch, T position in zig-zag order, t tokens of a device, c = t/2 of a chunk, N query
heads, n = N/P of one device, K key/value heads, k = K/P of one device, H head width, R latent
width, P rotated width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.config.model import LatentAttentionConfig, MixerConfig
from jaxinfra.config.run import LATENT_METHODS, AttentionImplementation, ContextMethod
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.attention import (
    PartialAttention,
    attention,
    expanded,
    merge_partials,
    partial_attention,
)
from jaxinfra.ops.multiply import multiply
from jaxinfra.parallel.collectives import all_gather, all_to_all, num_devices, rank
from jaxinfra.parallel.context.halo import windowed_attention
from jaxinfra.parallel.context.ring import Ring, ring_attention
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import chunk_length, chunks_in_sequence, chunks_in_zigzag

_AXIS = str(MeshAxis.CONTEXT)
_ROWS = (axes.BATCH, axes.SEQUENCE)


def _whole[Arrays](tree: Arrays) -> Arrays:
    """Gathers arrays [B, t, ...] of this device's tokens to all tokens, in the sequence's order."""

    def whole(x_Bt: jax.Array) -> jax.Array:
        return chunks_in_sequence(all_gather(x_Bt, _AXIS, dim=1), num_devices(_AXIS))

    return jax.tree.map(whole, tree)


def _by_heads(
    q_BtNH: jax.Array,
    k_BtKH: jax.Array,
    v_BtKH: jax.Array,
    ids_Bt: jax.Array | None,
    *,
    config: MixerConfig,
    implementation: AttentionImplementation,
) -> Float[Array, "B t N Hv"]:
    """Computes attention by Ulysses: of this device's share of the heads, to the whole sequence."""
    num_kv_heads, num_shards = k_BtKH.shape[2], num_devices(_AXIS)
    if num_kv_heads % num_shards:
        raise ConfigError(
            f"context_method=ulysses spreads {num_kv_heads} key/value heads (of a tensor shard) "
            f"over context={num_shards} devices, which does not divide; choose "
            "context_method=ring, or a context size that divides"
        )

    def heads(x_BtNH: jax.Array) -> jax.Array:
        x_BTnH = all_to_all(x_BtNH, _AXIS, split_dim=2, concat_dim=1)
        return chunks_in_sequence(x_BTnH, num_shards)

    out_BTnH = attention(
        *map(heads, (q_BtNH, k_BtKH, v_BtKH)),
        config=config,
        segment_ids_BT=_whole(ids_Bt),
        implementation=implementation,
    )
    out_BTnH = chunks_in_zigzag(out_BTnH, num_shards)
    return all_to_all(out_BTnH, _AXIS, split_dim=1, concat_dim=2)


def _attention_to_all(
    part: PartialAttention,
    q_BtNH: jax.Array,
    own: tuple[jax.Array, jax.Array],
    every: tuple[jax.Array, jax.Array],
    ids_Bt: jax.Array | None,
) -> jax.Array:
    """Computes causal attention of this device's queries to all keys, [B, t, N, Hv] in q's dtype.

    Args:
        q_BtNH, own, ids_Bt: queries, (keys, values), documents of this device, in zig-zag order.
        every: (keys, values) of all tokens, in the sequence's order.
    """
    size, me = num_devices(_AXIS), rank(_AXIS)
    chunk, ids_BT = q_BtNH.shape[1] // 2, _whole(ids_Bt)
    outs = []
    for half, number in enumerate((me, 2 * size - 1 - me)):
        mine = slice(half * chunk, (half + 1) * chunk)
        ids_Bc = None if ids_Bt is None else ids_Bt[:, mine]
        own_part = part.forward(
            q_BtNH[:, mine],
            *(x[:, mine] for x in own),
            is_causal=True,
            q_ids_BT=ids_Bc,
            kv_ids_BS=ids_Bc,
        )
        # No device's chunk has more keys before it than these.
        most = ((half + 1) * size - 1) * chunk
        before = part.forward(
            q_BtNH[:, mine],
            *(x[:, :most] for x in every),
            is_causal=False,
            q_ids_BT=ids_Bc,
            kv_ids_BS=None if ids_BT is None else ids_BT[:, :most],
            kv_lengths_B=jnp.full(q_BtNH.shape[0], number * chunk),
        )
        outs.append(merge_partials(*own_part, *before)[0])
    return jnp.concatenate(outs, axis=1).astype(q_BtNH.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextAttention:
    """Self-attention whose sequence dim is sharded over the context axis, in zig-zag order.

    Args:
        placement: the mesh, and which of its axes shard batch, sequence and heads.
        method: how keys reach queries; "auto" is the ring, or all_gather in a pipeline. With ring
            and all_gather, windowed layers fetch only the keys in their window (``halo``), except
            in a pipeline.
        implementation: kernel for the attention on one device.
    """

    placement: Placement
    method: ContextMethod = ContextMethod.AUTO
    implementation: AttentionImplementation = AttentionImplementation.AUTO

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
        """Returns [B, T, N, H] in q's dtype, placed as q.

        Raises ConfigError where the sequence does not cut into 2P chunks, or Ulysses' heads into
        P; UnsupportedError where the implementation cannot compute a device's part, or a pipeline's
        stage would send from device to device.
        """
        if self.method is ContextMethod.RING and self._is_stage:
            # A collective over groups involves one stage's devices; a permutation involves all.
            raise UnsupportedError(
                f"context_method={self.method.value} in a pipeline: its sends would wait for "
                "stages that do something else; use context_method=all_gather or ulysses"
            )
        if sinks_N is not None:
            raise UnsupportedError(
                "attention with sinks over the context axis: parts of a softmax are merged without "
                "them; leave context out of the mesh"
            )
        chunk_length(q_BTNH.shape[1], self.placement.mesh.shape[MeshAxis.CONTEXT])
        q_spec = self.placement.spec((*_ROWS, axes.Q_HEADS, axes.HEAD))
        kv_spec = self.placement.spec((*_ROWS, axes.KV_HEADS, axes.HEAD))
        ids_spec = None if segment_ids_BT is None else self.placement.spec(_ROWS)
        return self.placement.on_each_device(
            functools.partial(self._local, config=config),
            in_specs=(q_spec, kv_spec, kv_spec, ids_spec),
            out_specs=q_spec,
            # A kernel does not say over which axes its results vary; nothing is summed over any.
            check_vma=False,
        )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)

    @property
    def _is_stage(self) -> bool:
        return self.placement.mesh.shape[MeshAxis.PIPE] > 1

    def _local(
        self,
        q_BtnH: jax.Array,
        k_BtkH: jax.Array,
        v_BtkH: jax.Array,
        ids_Bt: jax.Array | None,
        *,
        config: MixerConfig,
    ) -> jax.Array:
        operands = (q_BtnH, k_BtkH, v_BtkH)
        if self.method is ContextMethod.ULYSSES:
            return _by_heads(*operands, ids_Bt, config=config, implementation=self.implementation)
        part, num_shards = partial_attention(config, self.implementation), num_devices(_AXIS)
        # Where the window leaves keys out, a query reaches those before its own that are in it.
        if config.window is not None and config.window < q_BtnH.shape[1] * num_shards:
            return windowed_attention(
                part, _AXIS, *operands, ids_Bt, left=config.window - 1, permutes=not self._is_stage
            )
        if self.method is ContextMethod.ALL_GATHER or self._is_stage:
            keys = (k_BtkH, v_BtkH)
            return _attention_to_all(part, q_BtnH, keys, _whole(keys), ids_Bt)
        return ring_attention(Ring(part=part, axis=_AXIS, num_shards=num_shards), *operands, ids_Bt)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextLatentAttention:
    """Latent attention over sequences that the context axis shards, in zig-zag order.

    Args:
        placement: the mesh, and which of its axes shard batch, sequence and heads.
        method: one of ``LATENT_METHODS``.
        implementation: kernel for the attention on one device.
    """

    placement: Placement
    method: ContextMethod
    implementation: AttentionImplementation

    def __call__(
        self,
        q_BTNH: jax.Array,
        latent_BTR: jax.Array,
        key_BTP: jax.Array,
        up_RNH: jax.Array,
        *,
        config: LatentAttentionConfig,
        recipe: Recipe,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        """Returns [B, T, N, Hv] in q's dtype, placed as q.

        Raises ConfigError where the sequence does not cut into chunks; UnsupportedError for another
        method, or a window that leaves keys out.
        """
        length, place = q_BTNH.shape[1], self.placement
        chunk_length(length, place.mesh.shape[MeshAxis.CONTEXT])
        if self.method not in LATENT_METHODS:
            raise UnsupportedError(
                f"context_method={self.method.value} with latent attention: devices exchange "
                f"latents, not heads; choose {' or '.join(each.value for each in LATENT_METHODS)}"
            )
        if config.window is not None and config.window < length:
            raise UnsupportedError(
                f"window={config.window} with latent attention over the context axis; leave the "
                "window or the axis out"
            )
        q_spec = place.spec((*_ROWS, axes.Q_HEADS, axes.HEAD))
        latent_spec = place.spec((*_ROWS, None))
        up_spec = place.spec((None, axes.Q_HEADS, None))
        ids_spec = None if segment_ids_BT is None else place.spec(_ROWS)
        return place.on_each_device(
            functools.partial(self._local, config=config, recipe=recipe),
            in_specs=(q_spec, latent_spec, latent_spec, up_spec, ids_spec),
            out_specs=q_spec,
            # A kernel does not say over which axes its results vary; nothing is summed over any.
            check_vma=False,
        )(q_BTNH, latent_BTR, key_BTP, up_RNH, segment_ids_BT)

    def _local(
        self,
        q_BtNH: jax.Array,
        latent_BtR: jax.Array,
        key_BtP: jax.Array,
        up_RNH: jax.Array,
        ids_Bt: jax.Array | None,
        *,
        config: LatentAttentionConfig,
        recipe: Recipe,
    ) -> jax.Array:
        def heads(both: jax.Array) -> tuple[jax.Array, jax.Array]:
            latent, key = jnp.split(both, [config.kv_rank], axis=-1)
            up = multiply("BTR,RNH->BTNH", latent, up_RNH, recipe=recipe)
            return expanded(up, key, config=config)

        # Side by side they travel in one send.
        both_Bt = jnp.concatenate([latent_BtR, key_BtP], axis=-1)
        part = partial_attention(config, self.implementation)
        return _attention_to_all(part, q_BtNH, heads(both_Bt), heads(_whole(both_Bt)), ids_Bt)


def context_bytes(
    method: ContextMethod,
    *,
    num_shards: int,
    tokens: int,
    q_width: float,
    kv_width: float,
    itemsize: float,
    is_packed: bool,
) -> tuple[float, float]:
    """Counts the bytes that a device sends in a layer's full-length (not windowed) attention.

    Returns the bytes of the forward pass and of the backward pass.

    Args:
        num_shards: P, the size of the context axis.
        tokens: number of tokens on one device, over all its rows: B t.
        q_width, kv_width: width of queries, and of keys and values together, over all heads of
            one device (its tensor shard).
        itemsize: bytes of an activation's element.
        is_packed: whether rows have segment ids, 4 bytes per token.
    """
    keys = tokens * kv_width
    ids = 4 * tokens if is_packed else 0

    def sent(kind: str, array_bytes: float) -> float:
        return sent_bytes(kind, array_bytes, num_shards)

    match method:
        case ContextMethod.AUTO | ContextMethod.RING:
            # Keys and documents both ways round; back, sums of the gradients in fp32.
            turns = num_shards - 1
            there = turns * sent("shift", keys * itemsize + ids)
            return there, there + turns * sent("shift", keys * 4)
        case ContextMethod.ALL_GATHER:
            every = num_shards * keys * itemsize
            forward = sent("all-gather", every + num_shards * ids)
            return forward, sent("reduce-scatter", every)
        case ContextMethod.ULYSSES:
            elements = 2 * tokens * q_width + keys  # queries and outputs
            moved = sent("all-to-all", elements * itemsize)
            return moved + sent("all-gather", num_shards * ids), moved
