"""Which keys a query sees, for a whole score matrix or for one tile of it.

Dims: B batch, T query position, S key position.
"""

import functools
import operator

import jax
import numpy as np

from .spec import AttentionMasks, AttentionSpec


def visible_BTS(
    spec: AttentionSpec,
    masks: AttentionMasks,
    *,
    diagonal: int,
    q_positions_T: jax.Array,
    kv_positions_S: jax.Array,
) -> jax.Array | None:
    """True where query t sees key s; None where nothing is hidden.

    Args:
        spec: the positional masks.
        masks: segment ids and lengths of the same rows and columns as the positions.
        diagonal: S - T of the whole call: query t is aligned with key t + diagonal.
        q_positions_T: int32 [T], positions in the whole query.
        kv_positions_S: int32 [S], positions in the whole key.

    Returns:
        bool [B or 1, T, S].
    """
    q_1T1 = q_positions_T[None, :, None]
    s_11S = kv_positions_S[None, None, :]
    terms: list[jax.Array] = []
    if spec.left is not None:
        terms.append(s_11S >= q_1T1 + (diagonal - spec.left))
    if spec.right is not None:
        terms.append(s_11S <= q_1T1 + (diagonal + spec.right))
    if masks.q_segment_ids is not None and masks.kv_segment_ids is not None:
        q_ids_BT1 = masks.q_segment_ids[:, :, None]
        terms.append((q_ids_BT1 == masks.kv_segment_ids[:, None, :]) & (q_ids_BT1 >= 0))
    if masks.q_lengths is not None:
        terms.append(q_1T1 < masks.q_lengths[:, None, None])
    if masks.kv_lengths is not None:
        terms.append(s_11S < masks.kv_lengths[:, None, None])
    return functools.reduce(operator.and_, terms) if terms else None


def visible_tiles(
    spec: AttentionSpec, *, q_length: int, kv_length: int, q_tile: int, kv_tile: int
) -> np.ndarray:
    """Tiles of the score matrix in which the positional masks leave at least one entry.

    Returns:
        int32 [P, 2]: (query tile, key tile), ordered by query tile, then key tile.
    """
    diagonal = kv_length - q_length
    first_q = np.arange(0, q_length, q_tile)[:, None]
    last_q = np.minimum(first_q + q_tile, q_length) - 1
    first_kv = np.arange(0, kv_length, kv_tile)[None, :]
    last_kv = np.minimum(first_kv + kv_tile, kv_length) - 1
    seen = np.ones((first_q.shape[0], first_kv.shape[1]), dtype=bool)
    if spec.left is not None:
        seen &= last_kv >= first_q + diagonal - spec.left
    if spec.right is not None:
        seen &= first_kv <= last_q + diagonal + spec.right
    return np.argwhere(seen).astype(np.int32)
