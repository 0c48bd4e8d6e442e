"""Attention as the models call it, on top of ``pallas_kernels.flash_attention``.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, G = N/K,
H head width.
"""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxinfra.config.model import MixerConfig
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.core.errors import UnsupportedError
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
            sinks=sinks_N,
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
