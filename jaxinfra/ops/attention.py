"""Attention as the models call it, on top of ``pallas_kernels.flash_attention``.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, G = N/K,
H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxinfra.config.model import GroupedAttentionConfig, MixerConfig
from jaxinfra.config.parts import find_part
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.errors import ConfigError, UnsupportedError
from pallas_kernels.flash_attention import LSE_NAME, OUT_NAME


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K Hv"],
    *,
    config: MixerConfig,
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None = None,
    implementation: AttentionImplementation = AttentionImplementation.AUTO,
    is_causal: bool = True,
) -> Float[Array, "B T N Hv"]:
    """Computes self-attention within documents, with the config's window and soft cap.

    Returns [B, T, N, H] in q's dtype. Raises UnsupportedError where the named implementation
    cannot compute exactly that.
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
            is_causal=is_causal,
            local_window_size=None if config.window is None else (config.window - 1, 0),
            q_segment_ids=segment_ids_BT,
            kv_segment_ids=segment_ids_BT,
            logit_soft_cap=config.logit_soft_cap,
            sinks=sinks_N,
            implementation=implementation.value,
        )
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(str(error)) from error


def own_function(config: MixerConfig) -> str | None:
    """Names the user's function that replaces a mixer's attention; None without one."""
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
    """Tells a rematerialization policy to keep the values that attention's backward pass needs.

    Our implementations name their output and logsumexp; cuDNN's residuals are visible only as the
    results of JAX's own primitive.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


ATTENTION_NAMES = (OUT_NAME, LSE_NAME)
"""Names of the results of our own attention implementations."""


def named_attention(implementation: AttentionImplementation):
    """Returns ``attention`` with its implementation fixed."""
    return functools.partial(attention, implementation=implementation)
