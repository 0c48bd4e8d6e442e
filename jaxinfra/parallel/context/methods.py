"""Attention over a sequence that devices share, by one of two methods or by the ring (``ring``).

Ulysses (Jacobs et al. 2023) has heads instead of tokens on each device while attention runs. An
all-to-all gives each of P devices N/P heads of the whole sequence. Attention is local, by any
implementation, and a second all-to-all brings the tokens back. P must divide the key/value heads
of a tensor shard. Bytes per device: (2 N + 2 K) t H b (P-1)/P forward, as many backward. The ring
sends 2 K t H b (P-1), which is more where P > (N + K)/K. Nothing overlaps them within a layer.

Gathered keys: each device holds all keys and values, and its own queries. It is simple, and what
Llama 3 trained with (section 3.3.2): few large kernels, and memory for the whole sequence's keys,
which nothing overlaps with. The keys before a chunk are one unmasked part whose length differs by
device, its own are causal; both merge by logsumexp. Bytes per device: 2 (P-1) t K H b to gather
keys and values, as many to reduce their gradients.

Dims: B batch, T position in zig-zag order, t tokens of a device, c = t/2 of a chunk, N query
heads, n = N/P of one device, K key/value heads, k = K/P of one device, H head width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.config.model import MixerConfig
from jaxinfra.config.run import AttentionImplementation, ContextMethod
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.ops.attention import attention
from jaxinfra.ops.partial_attention import PartialAttention, merge_partials, partial_attention
from jaxinfra.parallel.collectives import all_gather, all_to_all, num_devices, rank
from jaxinfra.parallel.context.halo import windowed_attention
from jaxinfra.parallel.context.ring import Ring, ring_attention
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import chunk_length, chunks_in_sequence, chunks_in_zigzag


def require_heads(num_kv_heads: int, num_shards: int) -> None:
    """Raises ConfigError where the devices cannot share the key/value heads equally."""
    if num_kv_heads % num_shards:
        raise ConfigError(
            f"context_method=ulysses spreads {num_kv_heads} key/value heads (of a tensor shard) "
            f"over context={num_shards} devices, which does not divide; choose "
            "context_method=ring, or a context size that divides"
        )


def heads_to_tokens(out_BTnH: Float[Array, "B T n H"], axis: str) -> Float[Array, "B t N H"]:
    """Exchanges heads for tokens: all heads of this device's tokens, in zig-zag order."""
    out_BTnH = chunks_in_zigzag(out_BTnH, num_devices(axis))
    return all_to_all(out_BTnH, axis, split_dim=1, concat_dim=2)


def tokens_to_heads(x_BtNH: Float[Array, "B t N H"], axis: str) -> Float[Array, "B T n H"]:
    """Exchanges tokens for heads: this device's heads of all tokens, in the sequence's order."""
    x_BTnH = all_to_all(x_BtNH, axis, split_dim=2, concat_dim=1)
    return chunks_in_sequence(x_BTnH, num_devices(axis))


def all_documents(ids_Bt: Int32[Array, "B t"] | None, axis: str) -> Int32[Array, "B T"] | None:
    """Gathers the document ids of all tokens of the sequences, in the sequences' order."""
    if ids_Bt is None:
        return None
    return chunks_in_sequence(all_gather(ids_Bt, axis, dim=1), num_devices(axis))


def gathered_attention(
    part: PartialAttention,
    axis: str,
    q_BtNH: Float[Array, "B t N H"],
    k_BtKH: Float[Array, "B t K H"],
    v_BtKH: Float[Array, "B t K Hv"],
    ids_Bt: Int32[Array, "B t"] | None,
    *,
    is_causal: bool,
) -> Float[Array, "B t N Hv"]:
    """Computes attention of this device's queries to the whole sequence, by gathered keys.

    Returns [B, t, N, H] in q's dtype.

    Args:
        axis: the mesh axis of the sequence, manual here.
        q_BtNH, k_BtKH, v_BtKH: in zig-zag order if causal, else in any.
        ids_Bt: int32 documents, below 0 for padding; None where a row is one document.
        is_causal: whether queries see no keys at later positions of the sequence.
    """
    size = num_devices(axis)

    def whole(x_Bt: jax.Array) -> jax.Array:
        x_BT = all_gather(x_Bt, axis, dim=1)
        return chunks_in_sequence(x_BT, size) if is_causal else x_BT

    k_BTKH, v_BTKH = whole(k_BtKH), whole(v_BtKH)
    ids_BT = None if ids_Bt is None else whole(ids_Bt)
    if not is_causal:
        out, _ = part.forward(
            q_BtNH, k_BTKH, v_BTKH, is_causal=False, q_ids_BT=ids_Bt, kv_ids_BS=ids_BT
        )
        return out
    return causal_attention_to_all(
        part, axis, q_BtNH, (k_BtKH, v_BtKH), (k_BTKH, v_BTKH), ids_Bt, ids_BT
    )


def causal_attention_to_all(
    part: PartialAttention,
    axis: str,
    q_BtNH: jax.Array,
    own: tuple[jax.Array, jax.Array],
    every: tuple[jax.Array, jax.Array],
    ids_Bt: jax.Array | None,
    ids_BT: jax.Array | None,
) -> jax.Array:
    """Computes causal attention of this device's queries to all keys, [B, t, N, Hv] in q's dtype.

    Args:
        q_BtNH, own, ids_Bt: queries, (keys, values), documents of this device, in zig-zag order.
        every, ids_BT: (keys, values) and documents of all tokens, in the sequence's order.
    """
    size, me = num_devices(axis), rank(axis)
    chunk = q_BtNH.shape[1] // 2
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


_ROWS = (axes.BATCH, axes.SEQUENCE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextAttention:
    """Self-attention whose sequence dim is sharded over the context axis, in zig-zag order.

    Args:
        placement: the mesh, and which of its axes shard batch, sequence and heads.
        method: how keys reach queries; "auto" is the ring, or all_gather in a pipeline. Windowed
            layers fetch only the keys in their window (``halo``) under ring and all_gather;
            in a pipeline all_gather gathers all keys for them too.
        implementation: kernel for the attention on one device.
        is_causal: by place in the sequence.
    """

    placement: Placement
    method: ContextMethod = ContextMethod.AUTO
    implementation: AttentionImplementation = AttentionImplementation.AUTO
    is_causal: bool = True

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
        self._check_stages()
        if sinks_N is not None:
            raise UnsupportedError(
                "attention with sinks over the context axis: parts of a softmax are merged without "
                "them; leave context out of the mesh"
            )
        if not self.is_causal and config.window is not None:
            raise UnsupportedError(
                f"window={config.window} in attention that is not causal: a window here counts "
                "keys before the query; leave the window out"
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

    def _check_stages(self) -> None:
        """Refuses ring attention in a pipeline, whose stages do different things at a time. A
        collective over groups involves one stage's devices; a permutation involves all and would
        wait for them.
        """
        if self.method is ContextMethod.RING and self._is_stage:
            raise UnsupportedError(
                f"context_method={self.method.value} in a pipeline: its sends would wait for "
                "stages that do something else; use context_method=all_gather or ulysses"
            )

    def _local(
        self,
        q_BtnH: jax.Array,
        k_BtkH: jax.Array,
        v_BtkH: jax.Array,
        ids_Bt: jax.Array | None,
        *,
        config: MixerConfig,
    ) -> jax.Array:
        axis = str(MeshAxis.CONTEXT)
        num_shards = self.placement.mesh.shape[axis]
        operands = (q_BtnH, k_BtkH, v_BtkH)
        if self.method is ContextMethod.ULYSSES:
            require_heads(k_BtkH.shape[2], num_shards)
            out_BTnH = attention(
                *(tokens_to_heads(x, axis) for x in operands),
                config=config,
                segment_ids_BT=all_documents(ids_Bt, axis),
                implementation=self.implementation,
                is_causal=self.is_causal,
            )
            return heads_to_tokens(out_BTnH, axis)
        part = partial_attention(config, self.implementation)
        length = q_BtnH.shape[1] * num_shards
        reach = _reach(config, length)
        if reach is not None:
            return windowed_attention(
                part, axis, *operands, ids_Bt, left=reach, permutes=not self._is_stage
            )
        if self.method is ContextMethod.ALL_GATHER or self._is_stage:
            return gathered_attention(part, axis, *operands, ids_Bt, is_causal=self.is_causal)
        ring = Ring(part=part, axis=axis, num_shards=num_shards, is_causal=self.is_causal)
        return ring_attention(ring, *operands, ids_Bt)


def _reach(config: MixerConfig, length: int) -> int | None:
    """Keys before its own that a query reaches; None where its window leaves none of them out."""
    if config.window is None or config.window >= length:
        return None
    return config.window - 1
