"""What an attention call computes, as one static value and one bundle of arrays.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

Query t is aligned with key t + S - T (bottom-right): with a cache of past keys, the last query
sees the last key. Every positional mask below is relative to that diagonal.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The static part: hashable, so it keys caches, tuned tables and ``custom_vjp``.

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
    """The array part besides q, k, v; None where the call has none.

    A query attends only to keys of its own segment, and segment ids below zero mark padding: such
    queries have no keys and such keys are seen by nobody. A row with no visible key yields zeros
    and logsumexp -inf (with a sink, the sink's logit).
    """

    q_segment_ids: jax.Array | None = None  # int32 [B, T]
    kv_segment_ids: jax.Array | None = None  # int32 [B, S]
    q_lengths: jax.Array | None = None  # int32 [B]: queries at and after are padding
    kv_lengths: jax.Array | None = None  # int32 [B]: keys at and after are padding
    sinks: jax.Array | None = None  # float32 [N]: a logit a head that joins the softmax denominator
    bias: jax.Array | None = None  # [B|1, N|1, T|1, S|1], added to the capped scores
