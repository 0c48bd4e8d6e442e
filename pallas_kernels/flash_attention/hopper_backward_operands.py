"""What the backward kernels read.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .hopper_geometry import pad_rows
from .hopper_segments import tile_ranges, token_ids
from .spec import AttentionMasks

LOG2E = math.log2(math.e)


def backward_operands(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    q_tile: int,
    kv_tile: int,
    by_keys: bool,
) -> dict[str, Any]:
    """Arrays by the names under which a kernel finds them; ids and ranges where tokens have ids.

    Args:
        q, k, v, masks, out, lse, d_out, d_lse: as the backward gets them.
        q_tile, kv_tile: lengths of the kernel's tiles.
        by_keys: whether a block owns a key tile and visits ``ranges`` of query tiles, or the other
            way round.
    """
    (B, T), S = q.shape[:2], k.shape[1]
    lse2, delta = row_statistics(out, lse, d_out, d_lse, -(-T // q_tile) * q_tile)
    q, k, v, d_out = (pad_rows(x) for x in (q, k, v, d_out))
    operands = {"q": q, "k": k, "v": v, "do": d_out, "lse": lse2, "delta": delta}
    ids = token_ids(masks, B=B, T=T, S=S, q_tile=q_tile, kv_tile=kv_tile)
    if ids is None:
        return operands
    q_ids, kv_ids = ids
    if by_keys:
        ranges = tile_ranges(kv_ids, q_ids, kv_tile, q_tile)
    else:
        ranges = tile_ranges(q_ids, kv_ids, q_tile, kv_tile)
    return operands | {"q_ids": q_ids, "kv_ids": kv_ids, "ranges": ranges}


def row_statistics(
    out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None, padded: int
) -> tuple[jax.Array, jax.Array]:
    """Per query [B, N, padded]: logsumexp in log2 units, and delta = dO . O - d_lse.

    With P = exp(S - lse) and dP = dO V', dS = P * (dP - delta).
    """
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse.swapaxes(1, 2)
    # exp2(s - inf) = 0: rows without keys and rows past the end have no probabilities. Nor may the
    # cotangent of their logsumexp of -inf matter, which can be NaN.
    empty = jnp.isneginf(lse).swapaxes(1, 2)
    delta = jnp.where(empty, 0.0, delta)
    lse2 = jnp.where(empty, jnp.inf, lse.swapaxes(1, 2) * LOG2E)
    pad = ((0, 0), (0, 0), (0, padded - lse2.shape[2]))
    return jnp.pad(lse2, pad, constant_values=jnp.inf), jnp.pad(delta, pad)
