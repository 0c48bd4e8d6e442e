"""Public functions of flash attention: they check a call, choose an implementation and run it.

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.varying import vary_alike

from . import cudnn, reference
from .dispatch import choose
from .implementations import (
    IMPLEMENTATIONS,
    OUT_NAME,
    AttentionPlan,
    attend,
    attend_gradient,
    attend_traceable,
    by_use,
)
from .spec import AttentionCall, AttentionSpec, BackwardOperands, MeshAxes
from .validate import make_call

type Window = int | tuple[int | None, int | None] | None
type ImplementationName = Literal["auto", "hopper", "cudnn", "xla", "reference"]


@overload
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: ImplementationName = "auto",
    return_residual: Literal[False] = False,
    mesh_axes: MeshAxes | None = None,
) -> jax.Array: ...


@overload
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: ImplementationName = "auto",
    return_residual: Literal[True],
    mesh_axes: MeshAxes | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    logit_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: ImplementationName = "auto",
    return_residual: bool = False,
    mesh_axes: MeshAxes | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes exact attention, ``softmax(soft_cap(scale * q k^T) + bias) v``, in linear memory.

    Layout and argument names follow ``jax.nn.dot_product_attention``. Differences: positions are
    aligned bottom-right (query t with key t + S - T) where T != S; the logsumexp is float32 and
    differentiable; segment ids, a soft cap and sinks exist; bias is added after the cap, so that it
    can mask; a row that sees no key is 0. Even keys and values that no query sees must be finite,
    since 0 times NaN is NaN.

    Algorithms: FlashAttention-2 (Dao 2023); on Hopper FlashAttention-3 (Shah et al. 2024).

    Args:
        query: bfloat16, float16 or float32 [B, T, N, H].
        key: [B, S, K, H] of the query's dtype; K divides N, and query head n reads kv head
            n // (N / K).
        value: [B, S, K, V] of the query's dtype.
        bias: floats that broadcast to [B, N, T, S], added to the scores. Its gradient is computed.
        scale: factor of the scores, a Python number; default 1 / sqrt(H).
        is_causal: a query sees no key after its own position.
        local_window_size: (left, right): a query sees ``left`` keys before its own position and
            ``right`` after it, None for all of them. An int is both; with ``is_causal`` the right
            is 0. (A model's "sliding window of w tokens" is ``(w - 1, 0)``.)
        q_segment_ids: integers [B, T]; a query sees only keys of its own segment. Ids below 0 mark
            padding, which sees nothing and which no query sees.
        kv_segment_ids: integers [B, S], given with ``q_segment_ids``.
        query_seq_lengths: integers [B]; queries at and after the length are padding.
        key_value_seq_lengths: integers [B]; keys at and after the length are padding. Positions
            stay those of the whole arrays.
        logit_soft_cap: scores become ``cap * tanh(scale * q k^T / cap)``.
        sinks: floats [N]: one logit per head that joins the softmax denominator, without a value.
        implementation: "auto" takes the one measured fastest on this device (its forward alone if
            the call is not differentiated) and logs the choice once. "hopper" (Mosaic GPU kernels),
            "cudnn", "xla" (portable, linear memory) and "reference" (the formula, T x S memory)
            compute the call or raise.
        return_residual: also return the logsumexp of each row's scores.
        mesh_axes: mesh axes that shard the batch and the heads. Needed only for "hopper" inside a
            ``shard_map`` over some mesh axes, where the layout over the other axes cannot be
            inferred. Ignored elsewhere.

    Returns:
        out [B, T, N, V] in the query's dtype, or (out, logsumexp float32 [B, T, N]). The logsumexp
        of a row that sees no key is -inf, or the sink's logit. ``merge_partials`` combines results
        over disjoint keys.

    Raises:
        InputError: shapes, dtypes or options that disagree (a ValueError).
        UnsupportedError: the named implementation cannot compute this call; the message says why
            and which can (a NotImplementedError).

    Examples:
        >>> query = jnp.ones((2, 8, 4, 64), jnp.bfloat16)  # [B, T, N, H]
        >>> key = value = jnp.ones((2, 8, 2, 64), jnp.bfloat16)  # 2 kv heads for 4 query heads
        >>> out = pallas_kernels.flash_attention(query, key, value, is_causal=True)
        >>> out.shape, out.dtype
        ((2, 8, 4, 64), dtype(bfloat16))
    """
    call = make_call(
        query,
        key,
        value,
        bias=bias,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        logit_soft_cap=logit_soft_cap,
        sinks=sinks,
        return_residual=return_residual,
        mesh_axes=mesh_axes,
    )
    arrays = vary_alike((call.q, call.k, call.v, call.masks))
    # Of a forward alone another may be faster than of a forward and its gradient.
    names = dict.fromkeys(choose(implementation, call, gradient=each) for each in (False, True))
    functions = [_results_by(name, call) for name in names]
    results = functions[0](*arrays) if len(functions) == 1 else by_use(*functions, *arrays)
    return (results[0], results[1]) if return_residual else results[0]


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
    """Computes the gradient of attention over a part of the keys, from the results over all keys.

    Softmax over all keys has probabilities ``exp(score - lse)`` with the logsumexp of all keys. So
    a part's contribution to every gradient needs (out, lse) over all keys, but no other part's keys
    (Dao 2023, algorithm 2; Liu et al. 2023, ring attention):

        dS = P (dP - rowsum(dO O)),  P = exp(S - lse),  dP = dO V^T

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H], one part of the keys.
        value: [B, S, K, V], the values of these keys.
        out: [B, T, N, V] over all parts, in the query's dtype.
        lse: float32 [B, T, N] over all parts; -inf for a row that sees no key at all.
        d_out: the cotangent of ``out``, of its shape and dtype.
        scale: factor of the scores; default 1 / sqrt(H).
        is_causal: a query sees no key of this part after its own position, aligned bottom-right.
        local_window_size: as in ``flash_attention``, relative to that alignment.
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


def _results_by(name: str, call: AttentionCall) -> Callable[..., tuple[jax.Array, ...]]:
    """A function of (q, k, v, masks) to (out, logsumexp) or (out,), which holds no array."""
    match name:
        case "cudnn":
            function = functools.partial(_by_cudnn, call.spec)
        case "reference":
            forward = functools.partial(reference.forward, spec=call.spec)
            function = functools.partial(attend_traceable, forward, results=("out", "lse"))
        case _:
            function = functools.partial(attend, AttentionPlan.of(call, name))
    return functools.partial(_first, function, 2 if call.return_residual else 1)


def _by_cudnn(spec: AttentionSpec, *arrays: Any) -> tuple[jax.Array, ...]:
    # Its own gradient rule keeps its residuals, unnamed: only the output can be named here.
    forward = functools.partial(cudnn.forward, spec=spec)
    (out,) = attend_traceable(forward, *arrays, results=("out",))
    return (checkpoint_name(out, OUT_NAME),)


def _first(
    function: Callable[..., tuple[jax.Array, ...]], count: int, *arrays: Any
) -> tuple[jax.Array, ...]:
    return function(*arrays)[:count]
