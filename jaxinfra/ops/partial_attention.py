"""Attention over a part of the keys, for results that are merged over several devices.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxinfra.config.model import MixerConfig
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.errors import UnsupportedError
from pallas_kernels import merge_partials as merge_partials


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialAttention:
    """Attention to a part of the keys, by one implementation; hashable, to key a gradient rule.

    Raises UnsupportedError, when called, where the implementation cannot return a logsumexp in
    fp32 (cuDNN through JAX) or cannot compute the call.
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
            is_causal: aligned bottom-right: query t sees no key after t + S - T.
            left: number of keys seen before that one; None for all.
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
            local_window_size=_window(left),
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
    """Returns a layer's attention to parts of the keys; the caller must apply the window."""
    return PartialAttention(
        scale=config.scale, logit_soft_cap=config.logit_soft_cap, implementation=implementation
    )


def _window(left: int | None) -> tuple[int | None, int | None] | None:
    return None if left is None else (left, None)


def _translated(function: Any, *arrays: jax.Array, **options: Any) -> Any:
    try:
        return function(*arrays, **options)
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(
            f"{error} (context parallelism merges partial results by their fp32 logsumexp; "
            "context_method=ulysses needs none)"
        ) from error
