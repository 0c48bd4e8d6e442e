"""The gradient of attention over a part of the keys, from the results over all of them.

Softmax over the union of key sets S_1, S_2 ... has probabilities ``exp(score - lse)`` with the
logsumexp of the union, so that a part's share of every gradient needs the union's (out, lse) and
nothing of the other parts (Dao 2023, algorithm 2; Liu et al. 2023, ring attention):

    dS = P (dP - rowsum(dO O)),  P = exp(S - lse),  dP = dO V^T

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.varying import vary_alike

from .api import ImplementationName, Window
from .dispatch import choose
from .implementations import IMPLEMENTATIONS, AttentionPlan, attend_gradient
from .spec import BackwardOperands, MeshAxes
from .validate import make_call


def flash_attention_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    logit_soft_cap: float | None = None,
    implementation: ImplementationName = "auto",
    mesh_axes: MeshAxes | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The share of these keys in dq, and their dk and dv; masks as in ``flash_attention``.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H], one part of the keys.
        value: [B, S, K, V], theirs.
        out: [B, T, N, V] over all parts, in the query's dtype.
        lse: float32 [B, T, N] over all parts; -inf for a row that sees no key at all.
        d_out: the cotangent of ``out``, of its shape and dtype.
        scale: of the scores; default 1 / sqrt(H).
        is_causal: a query sees no key of this part after its own position, aligned bottom-right.
        local_window_size: keys seen before and after that position.
        q_segment_ids: integers [B, T].
        kv_segment_ids: integers [B, S], given with ``q_segment_ids``.
        logit_soft_cap: scores become ``cap * tanh(score / cap)``.
        implementation: "auto", "hopper" or "xla".
        mesh_axes: as in ``flash_attention``.

    Returns:
        dq, dk, dv in the dtypes of query, key, value. Sum dq over the parts in float32.

    Raises:
        InputError: shapes, dtypes or options that disagree.
        UnsupportedError: the named implementation has no such gradient.

    Examples:
        >>> q = k = v = d_out = jnp.ones((1, 8, 2, 64))
        >>> out, lse = pallas_kernels.flash_attention(q, k, v, return_residual=True)
        >>> dq, dk, dv = pallas_kernels.flash_attention_gradient(q, k, v, out, lse, d_out)
        >>> dv.shape  # every key has an eighth of each of 8 queries' weight
        (1, 8, 2, 64)
    """
    call = make_call(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        logit_soft_cap=logit_soft_cap,
        return_residual=True,
        mesh_axes=mesh_axes,
    )
    wanted = (*call.q.shape[:3], call.v.shape[3])
    if out.shape != wanted or d_out.shape != wanted or lse.shape != wanted[:3]:
        raise InputError(
            f"out {out.shape}, d_out {d_out.shape} and lse {lse.shape} must be {wanted}, {wanted} "
            f"and {wanted[:3]}, after the query and the value"
        )
    if out.dtype != call.q.dtype or d_out.dtype != call.q.dtype or lse.dtype != jnp.float32:
        raise InputError(
            f"out {out.dtype} and d_out {d_out.dtype} must be of the query's dtype {call.q.dtype}, "
            f"and lse {lse.dtype} float32"
        )
    chosen = choose(implementation, call)
    if chosen not in IMPLEMENTATIONS:
        raise UnsupportedError(
            f"implementation={implementation!r} has no gradient from (out, lse); choose hopper, "
            "xla or auto"
        )
    q, k, v, masks, out, lse = vary_alike((call.q, call.k, call.v, call.masks, out, lse))
    d_out, d_lse = vary_alike((d_out, jnp.zeros_like(lse)))
    operands = BackwardOperands(
        q=q, k=k, v=v, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=d_lse
    )
    return attend_gradient(AttentionPlan.of(call, chosen), operands)[:3]
