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
from .spec import AttentionCall, BackwardOperands, MeshAxes
from .validate import check_qkv, make_masks, make_spec


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
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_qkv(query, key, value)
    wanted = (*query.shape[:3], value.shape[3])
    if out.shape != wanted or d_out.shape != wanted or lse.shape != wanted[:3]:
        raise InputError(
            f"out {out.shape}, d_out {d_out.shape} and lse {lse.shape} must be {wanted}, {wanted} "
            f"and {wanted[:3]}, after the query and the value"
        )
    if out.dtype != query.dtype or d_out.dtype != query.dtype or lse.dtype != jnp.float32:
        raise InputError(
            f"out {out.dtype} and d_out {d_out.dtype} must be of the query's dtype {query.dtype}, "
            f"and lse {lse.dtype} float32"
        )
    spec = make_spec(
        query.shape[1],
        key.shape[1],
        head_width=query.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logit_soft_cap=logit_soft_cap,
    )
    masks = make_masks(
        query,
        key,
        bias=None,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        sinks=None,
    )
    call = AttentionCall(
        spec=spec,
        masks=masks,
        q=query,
        k=key,
        v=value,
        backward="fused",
        return_residual=True,
        mesh_axes=mesh_axes,
    )
    chosen = choose(implementation, call)
    if chosen not in IMPLEMENTATIONS:
        raise UnsupportedError(
            f"implementation={implementation!r} has no gradient from (out, lse); choose hopper, "
            "xla or auto"
        )
    plan = AttentionPlan(
        implementation=IMPLEMENTATIONS[chosen], spec=spec, axes=mesh_axes or MeshAxes()
    )
    query, key, value, masks, out, lse = vary_alike((query, key, value, masks, out, lse))
    d_out, d_lse = vary_alike((d_out, jnp.zeros_like(lse)))
    operands = BackwardOperands(
        q=query, k=key, v=value, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=d_lse
    )
    return attend_gradient(plan, operands)[:3]
