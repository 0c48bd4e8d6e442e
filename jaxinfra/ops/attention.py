"""Attention as the models call it, on top of ``pallas_kernels.flash_attention``.

Queries attend to all keys, or to a part of them, if parts are then merged over several devices.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width,
P rotated width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxinfra.config.model import GroupedAttentionConfig, LatentAttentionConfig, MixerConfig
from jaxinfra.config.parts import find_part
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.ops.key_choice import KeyIndex, choice_bias
from pallas_kernels import merge_partials as merge_partials
from pallas_kernels.flash_attention import LSE_NAME, OUT_NAME

_WITHOUT_CHOICE = (AttentionImplementation.HOPPER, AttentionImplementation.CUDNN)


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K Hv"],
    *,
    config: MixerConfig,
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None = None,
    index: KeyIndex | None = None,
    implementation: AttentionImplementation = AttentionImplementation.AUTO,
) -> Float[Array, "B T N Hv"]:
    """Computes self-attention within documents, with the config's window and soft cap.

    Returns [B, T, N, Hv] in q's dtype. Raises UnsupportedError if the named implementation does
    not support the config.

    Args:
        index: of an indexer, whose ``top_k`` keys are all that a query attends to.
    """
    if own_function(config) is not None:
        index_T = jnp.arange(q_BTNH.shape[1], dtype=jnp.int32)
        distance_BTS = (index_T[:, None] - index_T[None, :])[None]
        mask_BTS = distance_BTS >= 0
        if segment_ids_BT is not None:
            mask_BTS &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        return own_attention(q_BTNH, k_BTKH, v_BTKH, config, mask_BTS, distance_BTS)
    try:
        return pallas_kernels.flash_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            scale=config.scale,
            is_causal=True,
            local_window_size=None if config.window is None else (config.window - 1, 0),
            q_segment_ids=segment_ids_BT,
            kv_segment_ids=segment_ids_BT,
            logit_soft_cap=config.logit_soft_cap,
            sinks=sinks_N,
            bias=_bias(config, q_BTNH, index, segment_ids_BT, implementation),
            implementation=implementation.value,
        )
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(str(error)) from error


def distance_slopes(config: MixerConfig, num_heads: int) -> jax.Array | None:
    """Returns each head's slope, fp32 [N], or None; raises UnsupportedError for a part of heads."""
    slopes = config.distance_slopes if isinstance(config, GroupedAttentionConfig) else None
    if slopes is None:
        return None
    if len(slopes) != num_heads:
        raise UnsupportedError(
            f"distance_slopes of {len(slopes)} heads, {num_heads} of them on a device: heads with "
            "slopes are not split over a tensor axis; use fsdp instead"
        )
    return jnp.asarray(slopes, jnp.dtype("float32"))


def _bias(
    config: MixerConfig,
    q_BTNH: jax.Array,
    index: KeyIndex | None,
    segment_ids_BT: jax.Array | None,
    implementation: AttentionImplementation,
) -> jax.Array | None:
    if not isinstance(config, LatentAttentionConfig) or config.indexer is None:
        return _distance_bias(config, q_BTNH)
    assert index is not None, "LatentAttention"
    top_k, length = config.indexer.top_k, q_BTNH.shape[1]
    if top_k < length and implementation in _WITHOUT_CHOICE:
        raise UnsupportedError(
            f"attention={implementation.value} with an indexer that chooses top_k={top_k} of "
            f"{length} keys: a choice by key is XLA's alone; set attention=auto or xla"
        )
    return choice_bias(index, segment_ids_BT, top_k=top_k, dtype=q_BTNH.dtype)


def _distance_bias(config: MixerConfig, q_BTNH: jax.Array) -> jax.Array | None:
    """Bias of scores by distance, fp32 [1, N, T, T], or None (ALiBi, arXiv 2108.12409)."""
    slopes_N = distance_slopes(config, q_BTNH.shape[2])
    if slopes_N is None:
        return None
    index_T = jnp.arange(q_BTNH.shape[1], dtype=slopes_N.dtype)
    distance_TS = index_T[:, None] - index_T[None, :]
    return -slopes_N[None, :, None, None] * distance_TS[None, None]


def own_function(config: MixerConfig) -> str | None:
    """Returns the name of the user's function in place of a mixer's attention, or None."""
    return config.function if isinstance(config, GroupedAttentionConfig) else None


def own_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    config: MixerConfig,
    mask_BTS: jax.Array,
    distance_BTS: jax.Array,
) -> jax.Array:
    """Computes attention by a user's function ``(q, k, v, *, mask, distance) -> out``.

    Args:
        mask_BTS: bool, keys that a query may see by causality, documents, window and padding.
        distance_BTS: int32, position of the query minus position of the key.
    """
    name = own_function(config)
    assert name is not None, "asked by the caller"
    batch = q_BTNH.shape[0]
    if config.window is not None:
        mask_BTS = mask_BTS & (distance_BTS < config.window)
    out_BTNH = find_part(name)(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=jnp.broadcast_to(mask_BTS, (batch, *mask_BTS.shape[1:])),
        distance=jnp.broadcast_to(distance_BTS, (batch, *distance_BTS.shape[1:])),
    )
    if out_BTNH.shape != q_BTNH.shape:
        raise ConfigError(
            f"{name} returns {out_BTNH.shape} for queries of {q_BTNH.shape}; both are [batch, "
            "queries, heads, width]"
        )
    return out_BTNH.astype(q_BTNH.dtype)


def is_attention_result(primitive: Any, *_: Any, **__: Any) -> bool:
    """Remat policy that keeps the results of cuDNN attention, which its backward pass reads.

    Other implementations give these results the checkpoint names ``ATTENTION_NAMES``.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


ATTENTION_NAMES = (OUT_NAME, LSE_NAME)
"""Names of the results of our own attention implementations."""


def expanded(
    up_BTNH: Float[Array, "B T N H"],
    key_BTP: Float[Array, "B T P"],
    *,
    config: LatentAttentionConfig,
) -> tuple[Float[Array, "B T N Hk"], Float[Array, "B T N Hv"]]:
    """Builds all heads' keys and values for latent attention (arXiv 2405.04434, equations 9 to 16).

    Args:
        up_BTNH: up projection of the latents: each head's key without position, then its value.
        key_BTP: the rotated key that all heads share, appended to each head's key.
    """
    nope_BTNH, v_BTNH = jnp.split(up_BTNH, [config.nope_dim], axis=-1)
    shared_BTNP = jnp.broadcast_to(key_BTP[:, :, None], (*nope_BTNH.shape[:-1], key_BTP.shape[-1]))
    return jnp.concatenate([nope_BTNH, shared_BTNP], axis=-1), v_BTNH


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialAttention:
    """Attention to a part of the keys; hashable, so it can be a static argument of a custom_vjp.

    A call raises UnsupportedError if the implementation does not support its arguments, or cannot
    return a logsumexp in fp32 (cuDNN through JAX).
    """

    scale: float | None
    logit_soft_cap: float | None
    implementation: AttentionImplementation

    def forward(
        self,
        q_BTNH: Float[Array, "B T N H"],
        k_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K Hv"],
        *,
        is_causal: bool,
        left: int | None = None,
        q_ids_BT: Int[Array, "B T"] | None = None,
        kv_ids_BS: Int[Array, "B S"] | None = None,
        kv_lengths_B: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
        """Returns (out [B, T, N, H] in q's dtype, logsumexp fp32 [B, T, N]), both differentiable.

        Args:
            is_causal: whether query t sees only keys up to t + S - T (aligned at the last key).
            left: number of keys that a query sees before key t + S - T; None for all.
            q_ids_BT, kv_ids_BS: int32 document ids, below 0 for padding; both or neither.
            kv_lengths_B: int32, number of valid keys of each row.
        """
        return _translated(
            pallas_kernels.flash_attention,
            q_BTNH,
            k_BSKH,
            v_BSKH,
            scale=self.scale,
            is_causal=is_causal,
            local_window_size=None if left is None else (left, None),
            q_segment_ids=q_ids_BT,
            kv_segment_ids=kv_ids_BS,
            key_value_seq_lengths=kv_lengths_B,
            logit_soft_cap=self.logit_soft_cap,
            implementation=self.implementation.value,
            return_residual=True,
        )

    def gradient(
        self,
        q_BTNH: Float[Array, "B T N H"],
        k_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K Hv"],
        *,
        out_BTNH: Float[Array, "B T N Hv"],
        lse_BTN: Float[Array, "B T N"],
        d_out_BTNH: Float[Array, "B T N Hv"],
        is_causal: bool,
        q_ids_BT: Int[Array, "B T"] | None = None,
        kv_ids_BS: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """Computes this part's contribution to dq, and dk and dv of its keys.

        Args:
            out_BTNH, lse_BTN: output and logsumexp merged over all parts.
            d_out_BTNH: cotangent of the merged output.
            is_causal, q_ids_BT, kv_ids_BS: this part's mask, as in ``forward``.
        """
        return _translated(
            pallas_kernels.flash_attention_gradient,
            q_BTNH,
            k_BSKH,
            v_BSKH,
            out_BTNH,
            lse_BTN,
            d_out_BTNH,
            scale=self.scale,
            is_causal=is_causal,
            q_segment_ids=q_ids_BT,
            kv_segment_ids=kv_ids_BS,
            logit_soft_cap=self.logit_soft_cap,
            implementation=self.implementation.value,
        )


def partial_attention(
    config: MixerConfig, implementation: AttentionImplementation
) -> PartialAttention:
    """Returns the ``PartialAttention`` of a layer; the caller must apply the layer's window."""
    if isinstance(config, GroupedAttentionConfig) and (config.chunk or config.distance_slopes):
        raise UnsupportedError(
            "attention with chunks or distance slopes over the context axis: parts of a sequence "
            "are merged without them; use fsdp instead"
        )
    return PartialAttention(
        scale=config.scale, logit_soft_cap=config.logit_soft_cap, implementation=implementation
    )


def _translated(function: Any, *arrays: jax.Array, **options: Any) -> Any:
    try:
        return function(*arrays, **options)
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(
            f"{error} (context parallelism merges partial results by their fp32 logsumexp; "
            "context_method=ulysses needs none)"
        ) from error
