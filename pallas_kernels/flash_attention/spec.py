"""Description of an attention call: its static part, its arrays, and which keys a query sees.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

Query t is aligned with key t + S - T (bottom-right): with a cache of past keys, the last query
sees the last key. Every positional mask below is relative to that diagonal.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The static part of an attention call; hashable, so that it can key caches and tuned tables.

    Key s is visible to query t if ``t + S - T - left <= s <= t + S - T + right``; None is no bound.
    Causal attention is ``right = 0``. A model's "sliding window of w tokens" is ``left = w - 1``.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    logit_soft_cap: float | None = None  # scores become cap * tanh(scale * q.k / cap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMasks:
    """The arrays of an attention call besides q, k and v; None where the call has none.

    A query attends only to keys of its own segment, and segment ids below zero mark padding:
    padding queries see no keys and no query sees padding keys. A row with no visible key yields
    zeros and logsumexp -inf (with a sink, the sink's logit).
    """

    q_segment_ids: jax.Array | None = None  # int32 [B, T]
    kv_segment_ids: jax.Array | None = None  # int32 [B, S]
    q_lengths: jax.Array | None = None  # int32 [B]: queries at and after are padding
    kv_lengths: jax.Array | None = None  # int32 [B]: keys at and after are padding
    sinks: jax.Array | None = None  # float32 [N]: logit per head added to the softmax denominator
    bias: jax.Array | None = None  # [B|1, N|1, T|1, S|1], added to the capped scores

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the mask arrays that are not None, by name."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: x for name in fields if (x := getattr(self, name)) is not None}


class MeshAxes(NamedTuple):
    """Mesh axes that split the batch and the query heads, as the caller declares them."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionCall:
    """One validated call of ``flash_attention``, from which an implementation is chosen.

    A named implementation that cannot compute a call raises an error and is never replaced.
    """

    spec: AttentionSpec
    masks: AttentionMasks
    q: jax.Array
    k: jax.Array
    v: jax.Array
    return_residual: bool = False
    mesh_axes: MeshAxes | None = None

    def describe(self) -> str:
        """Returns one line of shapes and options for logs and errors, equal for equal cases."""
        B, T, N, H = self.q.shape
        S, K = self.k.shape[1:3]
        return (
            f"{self.q.dtype} b{B} t{T} s{S} heads {N}/{K} width {H}/{self.v.shape[3]} "
            f"left={self.spec.left} right={self.spec.right} cap={self.spec.logit_soft_cap} "
            f"arrays=[{' '.join(self.masks.arrays())}] residual={self.return_residual}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardOperands:
    """Operands of attention's backward pass: the forward's operands, results and cotangents."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    masks: AttentionMasks
    out: jax.Array  # [B, T, N, Hv] in q's dtype
    lse: jax.Array  # float32 [B, T, N]
    d_out: jax.Array  # as out
    d_lse: jax.Array | None  # float32 [B, T, N]; None if the logsumexp is unused


class AttentionGradients(NamedTuple):
    """Gradients of an attention call's arrays, in their dtypes; None for absent masks."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    d_sinks: jax.Array | None = None
    d_bias: jax.Array | None = None


def visible_BTS(
    spec: AttentionSpec,
    masks: AttentionMasks,
    *,
    diagonal: int,
    q_positions_T: jax.Array,
    kv_positions_S: jax.Array,
) -> jax.Array | None:
    """Returns the mask that is True where query t sees key s; None where nothing is hidden.

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
    """Returns the tiles of the score matrix in which the positional masks leave at least one entry.

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
