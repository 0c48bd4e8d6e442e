"""``Execution.attend`` on a mesh whose context axis shards sequences.

Dims: B batch, T position in zig-zag order, N query heads, K key/value heads, H head width; t, n, k
of one device.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.config.model import MixerConfig
from jaxinfra.config.run import AttentionImplementation, ContextMethod
from jaxinfra.errors import UnsupportedError
from jaxinfra.ops.attention import attention
from jaxinfra.ops.partial_attention import partial_attention
from jaxinfra.parallel.context import ulysses
from jaxinfra.parallel.context.gathered import gathered_attention
from jaxinfra.parallel.context.halo import windowed_attention
from jaxinfra.parallel.context.ring import Ring, ring_attention
from jaxinfra.parallel.context.zigzag import chunk_length
from jaxinfra.parallel.place import Placement

_ROWS = (axes.BATCH, axes.SEQUENCE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextAttention:
    """Self-attention whose sequence dim is sharded over the context axis, in zig-zag order.

    Args:
        placement: the mesh, and which of its axes shard batch, sequence and heads.
        method: how keys meet queries; "auto" is the ring, and in a pipeline all_gather. Windowed
            layers fetch what their window reaches under ring and all_gather alike (``halo``);
            in a pipeline all_gather gathers for them too.
        implementation: of the attention on one device.
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
        """In a pipeline, stages do different things at a time. A collective over groups concerns
        the devices of one stage; a permutation names those of all, and would wait for them.
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
            ulysses.require_heads(k_BtkH.shape[2], num_shards)
            out_BTnH = attention(
                *(ulysses.tokens_to_heads(x, axis) for x in operands),
                config=config,
                segment_ids_BT=ulysses.all_documents(ids_Bt, axis),
                implementation=self.implementation,
                is_causal=self.is_causal,
            )
            return ulysses.heads_to_tokens(out_BTnH, axis)
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
