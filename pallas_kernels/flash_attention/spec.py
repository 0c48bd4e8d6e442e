"""What an attention call computes, as one static value and one bundle of arrays.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

Query t is aligned with key t + S - T (bottom-right): with a cache of past keys, the last query
sees the last key. Every positional mask below is relative to that diagonal.
"""

import dataclasses
from typing import NamedTuple

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

    def arrays(self) -> dict[str, jax.Array]:
        """Those that there are, by name."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: x for name in fields if (x := getattr(self, name)) is not None}


class MeshAxes(NamedTuple):
    """Mesh axes that split the batch and the query heads, as the caller declares them."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionCall:
    """One validated call of ``flash_attention``; who computes it depends on shapes and dtypes only.

    What cannot compute a call says why, so that a named implementation never silently becomes
    another.
    """

    spec: AttentionSpec
    masks: AttentionMasks
    q: jax.Array
    k: jax.Array
    v: jax.Array
    backward: str = "fused"
    return_residual: bool = False
    mesh_axes: MeshAxes | None = None

    def describe(self) -> str:
        """One line for logs and errors: equal lines are equal cases."""
        B, T, N, H = self.q.shape
        S, K = self.k.shape[1:3]
        return (
            f"{self.q.dtype} b{B} t{T} s{S} heads {N}/{K} width {H}/{self.v.shape[3]} "
            f"left={self.spec.left} right={self.spec.right} cap={self.spec.logit_soft_cap} "
            f"arrays=[{' '.join(self.masks.arrays())}] backward={self.backward} "
            f"residual={self.return_residual}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardOperands:
    """What a backward is given: the forward's operands and results, and the results' cotangents."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, Hv]
    masks: AttentionMasks
    out: jax.Array  # [B, T, N, Hv] in q's dtype
    lse: jax.Array  # float32 [B, T, N]
    d_out: jax.Array  # as out
    d_lse: jax.Array | None  # float32 [B, T, N]; None for a logsumexp that nobody used


class AttentionGradients(NamedTuple):
    """Gradients in the dtypes of what they are of; those of absent masks are None."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    d_sinks: jax.Array | None = None
    d_bias: jax.Array | None = None
