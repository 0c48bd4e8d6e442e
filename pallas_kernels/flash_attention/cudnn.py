"""cuDNN's fused attention through JAX, for calls on which cuDNN agrees with ``reference.py``."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import device

from .spec import AttentionCall, AttentionMasks, AttentionSpec


def unsupported(call: AttentionCall) -> str | None:
    """Returns why cuDNN, called through JAX, cannot serve a call; None if it can.

    JAX does not expose some of cuDNN's features: packed segments by offsets, another value width.
    cuDNN differs in others: it aligns a causal mask with T != S top-left, and rounds the logsumexp
    to the query's dtype.
    """
    facts = device.target()
    capability = facts.capability
    spec, masks = call.spec, call.masks
    T, H = call.q.shape[1], call.q.shape[3]
    S, V = call.k.shape[1], call.v.shape[3]
    max_head_width = 256 if capability is not None and capability >= (9, 0) else 128
    window = spec.left is not None or spec.right is not None
    reasons = (
        (capability is None, "it needs an NVIDIA GPU"),
        (facts.is_absent, "XLA plans its scratch memory only on a machine with the GPU"),
        (capability is not None and capability < (8, 0), "it needs compute capability 8.0"),
        (call.q.dtype not in (jnp.bfloat16, jnp.float16), f"it does not take {call.q.dtype}"),
        (H != V, f"JAX gives it one head width for key and value, not {H} and {V}"),
        (max_head_width < H or H % 8 > 0, f"head width {H} is not a multiple of 8 <= "
            f"{max_head_width}"),
        (T == 0 or S == 0, "it does not take empty sequences"),
        (window and T != S, f"its diagonal is top-left, ours bottom-right; {T} != {S}"),
        (spec.right not in (None, 0), f"it has no window to the right ({spec.right})"),
        (spec.left is not None and spec.right is None, "its left window must be causal"),
        (spec.logit_soft_cap is not None, "it has no logit soft cap in JAX"),
        (masks.q_segment_ids is not None, "it has no segment ids in JAX"),
        (masks.q_lengths is not None or masks.kv_lengths is not None,
            "its value for rows without keys is not ours"),
        (masks.sinks is not None, "it has no sinks in JAX"),
        (masks.bias is not None, "its bias gradient is silently zero for most bias shapes"),
        (call.return_residual, "JAX rounds its logsumexp to the query's dtype"),
        (spec.scale <= 0, f"its gradients are NaN for scale {spec.scale}, which is not positive"),
        (T % 2 > 0 or S % 2 > 0, f"JAX refuses its gradient for odd lengths ({T}, {S})"),
    )  # fmt: skip
    return next((reason for applies, reason in reasons if applies), None)


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array]:
    """Computes attention by cuDNN: (out [B, T, N, H],), differentiable; see ``unsupported``."""
    del masks
    out = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        scale=spec.scale,
        is_causal=spec.right == 0,
        local_window_size=None if spec.left is None else (spec.left, 0),
        implementation="cudnn",
    )
    return (out,)
