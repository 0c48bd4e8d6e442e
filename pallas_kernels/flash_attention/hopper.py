"""Attention on Hopper GPUs: what these kernels take, and the calls the gradient rule makes.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import UnsupportedError

from . import hopper_backward, hopper_backward_split, hopper_backward_wide, hopper_forward
from .hopper_config import (
    SMEM_LIMIT_BYTES,
    BackwardConfig,
    ForwardConfig,
    backward_config,
    forward_config,
)
from .spec import AttentionMasks, AttentionSpec

DTYPES = (jnp.bfloat16, jnp.float16)
WIDEST_BY_KEYS = 128  # wider heads are split over columns in the backward
BACKWARD_PADDED = {80: 96}  # its halves must be whole swizzle atoms
WIDTHS = ("64/64", "80/80", "96/96", "128/128", "192/128", "192/192", "256/256")


def unsupported(
    spec: AttentionSpec, masks: AttentionMasks, q: jax.Array, k: jax.Array, v: jax.Array
) -> str | None:
    """Why these kernels, forward or backward, cannot compute this call; None if they can."""
    H, Hv = q.shape[3], v.shape[3]
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes q={q.dtype} k={k.dtype} v={v.dtype} are not all bfloat16 or all float16"
    widths = f"{H}/{Hv}"
    if widths not in WIDTHS:
        return f"head widths {widths} of query and value are none of {', '.join(WIDTHS)}"
    if masks.bias is not None:
        return "an additive bias is not implemented in these kernels"
    if spec.scale <= 0:
        return f"scale={spec.scale} is not positive, so the largest score is not the largest logit"
    if min(q.shape[1], k.shape[1]) == 0:
        return f"lengths T={q.shape[1]} S={k.shape[1]} leave nothing to load"
    return None


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, Hv] in q's dtype and logsumexp float32 [B, T, N].

    Raises:
        UnsupportedError: ``unsupported`` has a reason, or the tiles exceed shared memory.
    """
    _refuse(unsupported(spec, masks, q, k, v))
    config = config or forward_config(q.shape[3], v.shape[3])
    _refuse(_exceeds_shared_memory(config, q, v))
    return hopper_forward.forward(q, k, v, masks, spec=spec, config=config)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    spec: AttentionSpec,
    deterministic: bool,
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of q, k, v, and of the sinks where the call has them.

    Args:
        q, k, v, masks, spec: as in the forward.
        out, lse: what the forward returned.
        d_out, d_lse: cotangents of both; None for a logsumexp nobody used.
        deterministic: dQ summed in a fixed order, so that a repeated call returns the same bits.
        config: form for heads up to 128 wide; the table's where None.

    Raises:
        UnsupportedError: ``unsupported`` has a reason, or the tiles exceed shared memory.
    """
    _refuse(unsupported(spec, masks, q, k, v))
    H, Hv = q.shape[3], v.shape[3]
    width = BACKWARD_PADDED.get(H, max(H, Hv))
    q, k, v, wide_out, wide_d_out = (_pad_width(x, width) for x in (q, k, v, out, d_out))
    operands = (q, k, v, masks, wide_out, lse, wide_d_out, d_lse)
    if width > WIDEST_BY_KEYS:
        dq, dk, dv = hopper_backward_wide.backward(*operands, spec=spec)
    else:
        config = config or backward_config(width, width, q.shape[2] // k.shape[2])
        config.check(width)
        _refuse(_exceeds_shared_memory(config, q, v))
        dq, dk, dv = hopper_backward.backward(*operands, spec=spec, config=config)
    if deterministic:
        # Their dK and dV are summed in a fixed order, dQ is not.
        dq = hopper_backward_split.query_gradient(*operands, spec=spec)
    d_sinks = None
    if masks.sinks is not None:
        d_sinks = sink_gradient(masks.sinks, out, lse, d_out, d_lse)
    return dq[..., :H], dk[..., :H], dv[..., :Hv], d_sinks


def _pad_width(x: jax.Array, width: int) -> jax.Array:
    """Zero columns at the end: they change no score and their gradients are dropped."""
    return x if x.shape[3] == width else jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[3]),))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedError(f"Hopper attention: {reason}")


def _exceeds_shared_memory(
    config: ForwardConfig | BackwardConfig, q: jax.Array, v: jax.Array
) -> str | None:
    used = config.smem_bytes(q.shape[3], v.shape[3])
    if used <= SMEM_LIMIT_BYTES:
        return None
    return f"{config} takes {used} bytes of shared memory, and a block has {SMEM_LIMIT_BYTES}"


def sink_gradient(
    sinks: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> jax.Array:
    """A sink is a key with no value: its score's gradient is -P delta, summed over queries.

    A row without keys whose sink is -inf has no gradient, whatever its logsumexp's cotangent.
    """
    delta = jnp.einsum("btnh,btnh->btn", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse
    p = jnp.exp(sinks[None, None].astype(jnp.float32) - lse)
    return -jnp.where(jnp.isneginf(lse), 0.0, p * delta).sum(axis=(0, 1))
