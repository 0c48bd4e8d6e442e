"""Gradients of attention on Hopper GPUs, with the choice of the backward kernel.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.spec import (
    AttentionGradients,
    AttentionSpec,
    BackwardOperands,
)

from . import backward_by_columns, backward_by_keys
from .config import BackwardConfig, backward_config, exceeds_shared_memory, refuse, unsupported
from .tiles import pad_width

WIDEST_BY_KEYS = 128  # wider heads are split over columns
HALVES = 2 * 32
"""Divisor of head widths that warpgroups split in halves, which must be whole swizzle atoms."""


def backward(
    operands: BackwardOperands,
    *,
    spec: AttentionSpec,
    config: BackwardConfig | None = None,
) -> AttentionGradients:
    """Computes the gradients of q, k, v, and of the sinks where the call has them.

    Args:
        operands: the forward's operands, its results and their cotangents.
        spec: the forward call's static part.
        config: form for heads up to 128 wide; None takes that of the tuning table.

    Raises:
        UnsupportedError: ``unsupported`` has a reason, or the tiles exceed shared memory.
    """
    o = operands
    refuse(unsupported(spec, o.masks, o.q, o.k, o.v))
    H, Hv = o.q.shape[3], o.v.shape[3]
    by_columns = max(H, Hv) > WIDEST_BY_KEYS
    step = HALVES if by_columns else HALVES // 2
    q, k, v, out, d_out = (pad_width(x, step) for x in (o.q, o.k, o.v, o.out, o.d_out))
    wide = dataclasses.replace(o, q=q, k=k, v=v, out=out, d_out=d_out)
    if by_columns:
        dq, dk, dv = backward_by_columns.backward(wide, spec=spec)
    else:
        widths = q.shape[3], v.shape[3]
        config = config or backward_config(*widths, o.q.shape[2] // o.k.shape[2])
        config.check(widths[0])
        refuse(exceeds_shared_memory(config, *widths))
        dq, dk, dv = backward_by_keys.backward(wide, spec=spec, config=config)
    d_sinks = None if o.masks.sinks is None else sink_gradient(o)
    return AttentionGradients(dq[..., :H], dk[..., :H], dv[..., :Hv], d_sinks)


def sink_gradient(o: BackwardOperands) -> jax.Array:
    """Computes the sinks' gradient: -P delta summed over queries, as a sink is a key with value 0.

    A row without keys adds nothing to the gradient of a sink of -inf.
    """
    assert o.masks.sinks is not None
    delta = jnp.einsum("btnh,btnh->btn", o.out.astype(jnp.float32), o.d_out.astype(jnp.float32))
    if o.d_lse is not None:
        delta = delta - o.d_lse
    p = jnp.exp(o.masks.sinks[None, None].astype(jnp.float32) - o.lse)
    return -jnp.where(jnp.isneginf(o.lse), 0.0, p * delta).sum(axis=(0, 1))
