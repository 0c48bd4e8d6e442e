"""Attention as the models call it, on top of ``pallas_kernels.flash_attention``.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, G = N/K,
H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.config.model import MixerConfig
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.multiply import multiply
from pallas_kernels.flash_attention import LSE_NAME, OUT_NAME


def attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    config: MixerConfig,
    segment_ids_BT: jax.Array | None,
    implementation: AttentionImplementation = AttentionImplementation.AUTO,
    is_causal: bool = True,
) -> jax.Array:
    """Self-attention within documents, window and soft cap as the config says.

    Returns [B, T, N, H] in q's dtype. Raises UnsupportedError where the named implementation
    cannot compute exactly that.
    """
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
            implementation=implementation.value,
        )
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(str(error)) from error


def is_attention_result(primitive: Any, *_: Any, **__: Any) -> bool:
    """A rematerialization policy: keep what attention's backward needs, whoever computes it.

    Our implementations name their output and logsumexp; cuDNN's residuals are visible only as the
    results of JAX's own primitive.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"


ATTENTION_NAMES = (OUT_NAME, LSE_NAME)
"""Names of the results of our own attention implementations."""


def named_attention(implementation: AttentionImplementation):
    """``attention`` with the implementation fixed."""
    return functools.partial(attention, implementation=implementation)


def cached_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    config: MixerConfig,
    positions_BT: jax.Array,
) -> jax.Array:
    """Attention of new queries to a cache whose slot s holds the key of position s.

    Query t of row b sees slots ``positions[b, t] - window < s <= positions[b, t]``; later slots may
    hold anything finite. Scores and softmax in fp32; returns [B, T, N, H] in q's dtype.
    """
    batch, length, num_q_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BSKH.shape[2]
    recipe = Recipe(compute=q_BTNH.dtype, accum=jnp.dtype("float32"))
    dot = functools.partial(multiply, recipe=recipe)
    q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scale = head_dim**-0.5 if config.scale is None else config.scale
    scores_BKGTS = scale * dot("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, out=jnp.dtype("float32"))
    if config.logit_soft_cap is not None:
        cap = config.logit_soft_cap
        scores_BKGTS = cap * jnp.tanh(scores_BKGTS / cap)
    age_BTS = positions_BT[:, :, None] - jnp.arange(k_BSKH.shape[1])[None, None, :]
    visible_BTS = age_BTS >= 0
    if config.window is not None:
        visible_BTS &= age_BTS < config.window
    visible_B11TS = visible_BTS[:, None, None]
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1, where=visible_B11TS)
    out_BTKGH = dot("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return out_BTKGH.reshape(batch, length, num_q_heads, head_dim)
