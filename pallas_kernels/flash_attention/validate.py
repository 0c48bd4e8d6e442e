"""Checks of the arguments of ``flash_attention``, once for all implementations.

Dims: B batch, T query, S key, N query heads, K kv heads, H query and key width, V value width.
"""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.errors import InputError

from .spec import AttentionCall, AttentionMasks, AttentionSpec, MeshAxes

DTYPES = ("bfloat16", "float16", "float32")


def check_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raises InputError unless q [B,T,N,H], k [B,S,K,H], v [B,S,K,V] agree, with K dividing N."""
    for name, x, dims in (("query", q, "B,T,N,H"), ("key", k, "B,S,K,H"), ("value", v, "B,S,K,V")):
        if x.ndim != 4:
            raise InputError(
                f"{name} has shape {x.shape}; it must have four dims [{dims}]: "
                "add a batch dim, or use jax.vmap"
            )
    if not q.dtype == k.dtype == v.dtype or q.dtype.name not in DTYPES:
        raise InputError(
            f"query, key and value have dtypes {q.dtype}, {k.dtype}, {v.dtype}; all three must be "
            f"the same one of {', '.join(DTYPES)}: cast before the call"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InputError(
            f"query, key and value have batch sizes {q.shape[0]}, {k.shape[0]}, {v.shape[0]}; "
            "they must be equal"
        )
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"key {k.shape} and value {v.shape} must agree in their dims [B,S,K]; only the last, "
            "the head width, may differ"
        )
    if q.shape[3] != k.shape[3]:
        raise InputError(
            f"query has head width {q.shape[3]} and key {k.shape[3]}; a score is their dot "
            "product, so they must be equal"
        )
    if min(q.shape[0], q.shape[2], q.shape[3], *k.shape[2:], v.shape[3]) == 0:
        raise InputError(
            f"query {q.shape}, key {k.shape}, value {v.shape}: only sequence lengths may be 0"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(
            f"num_query_heads={q.shape[2]} is not a multiple of num_kv_heads={k.shape[2]}; query "
            "heads share kv heads in equal groups"
        )


def make_spec(
    q_length: int,
    kv_length: int,
    *,
    head_width: int,
    scale: float | None,
    is_causal: bool,
    local_window_size: int | tuple[int | None, int | None] | None,
    logit_soft_cap: float | None,
) -> AttentionSpec:
    """Returns the static part of an attention call, from the arguments of ``flash_attention``.

    A window bound that hides nothing at these lengths becomes None. So equivalent calls share a
    compiled kernel and a row of the tuning table, and every bound fits an int32.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(head_width)
    for name, number in (("scale", scale), ("logit_soft_cap", logit_soft_cap)):
        # A traced scale cannot be part of a compiled kernel.
        if number is None:
            continue
        if isinstance(number, jax.core.Tracer) or not math.isfinite(number):
            raise InputError(
                f"{name}={number} must be a finite Python number, known when the call is traced: "
                "multiply the query instead to scale by an array"
            )
    if logit_soft_cap is not None and logit_soft_cap <= 0:
        raise InputError(f"logit_soft_cap={logit_soft_cap} must be above 0; pass None for no cap")
    left, right = _window(local_window_size)
    if is_causal:
        right = 0
    # The last query is aligned with the last key, the first with key S - T.
    return AttentionSpec(
        scale=float(scale),
        left=None if left is None or left >= kv_length - 1 else left,
        right=None if right is None or right >= q_length - 1 else right,
        logit_soft_cap=None if logit_soft_cap is None else float(logit_soft_cap),
    )


def _window(
    size: int | tuple[int | None, int | None] | None,
) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    try:
        pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        left, right = (None if side is None else operator.index(side) for side in pair)
    except (TypeError, ValueError):  # neither an int nor two of them
        left = right = -1
    if any(side is not None and side < 0 for side in (left, right)):
        raise InputError(
            f"local_window_size={size!r} must be an int >= 0 or a pair (left, right) of them, "
            "None in the pair for an open side: the number of keys seen beside the query's own"
        )
    return left, right


def make_call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    scale: float | None,
    is_causal: bool,
    local_window_size: int | tuple[int | None, int | None] | None,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    logit_soft_cap: float | None,
    sinks: jax.Array | None = None,
    return_residual: bool,
    mesh_axes: MeshAxes | None,
) -> AttentionCall:
    """Validates the arguments of ``flash_attention`` and returns the call that they describe."""
    q, k, v = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_qkv(q, k, v)
    (B, T, N, H), S = q.shape, k.shape[1]
    spec = make_spec(
        T,
        S,
        head_width=H,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logit_soft_cap=logit_soft_cap,
    )
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise InputError(
            "q_segment_ids and kv_segment_ids come together: only one was given; self-attention "
            "passes the same array twice"
        )
    masks = AttentionMasks(
        q_segment_ids=_integers("q_segment_ids", q_segment_ids, (B, T)),
        kv_segment_ids=_integers("kv_segment_ids", kv_segment_ids, (B, S)),
        q_lengths=_integers("query_seq_lengths", query_seq_lengths, (B,)),
        kv_lengths=_integers("key_value_seq_lengths", key_value_seq_lengths, (B,)),
        sinks=_sinks(sinks, N),
        bias=_bias(bias, (B, N, T, S)),
    )
    return AttentionCall(
        spec=spec,
        masks=masks,
        q=q,
        k=k,
        v=v,
        return_residual=return_residual,
        mesh_axes=mesh_axes,
    )


def _integers(name: str, x: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    # NumPy's values can be looked at, before JAX cuts int64 to int32.
    given = np.asarray(x) if isinstance(x, (np.ndarray, list, tuple)) else jnp.asarray(x)
    if given.shape != shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise InputError(
            f"{name} is {given.dtype} {given.shape}; it must be integers of shape {shape}, after "
            "the query's and key's shapes"
        )
    if not np.can_cast(given.dtype, np.int32):
        limits = np.iinfo(np.int32)
        known = isinstance(given, np.ndarray)
        if not known or (given.size and not limits.min <= given.min() <= given.max() <= limits.max):
            raise InputError(
                f"{name} is {given.dtype}, whose values may not fit int32: cast it yourself; ids "
                "that differ by a multiple of 2**32 would be equal, and greater ones negative, "
                "which marks padding"
            )
    return jnp.asarray(given.astype(np.int32))


def _sinks(sinks: jax.Array | None, num_heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise InputError(
            f"sinks is {sinks.dtype} {sinks.shape}; it must be one float a query head: "
            f"({num_heads},)"
        )
    return sinks.astype(jnp.float32)


def _bias(bias: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    padded = (1,) * (4 - bias.ndim) + bias.shape
    fits = len(padded) == 4 and all(
        have in (1, want) for have, want in zip(padded, shape, strict=False)
    )
    if not fits or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise InputError(
            f"bias is {bias.dtype} {bias.shape}; it must be floats that broadcast to "
            f"[B,N,T,S] = {shape}"
        )
    return bias.reshape(padded)
