"""Checks of the arguments of ``paged_attention``, for all implementations. Dims: as in ``spec``."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.errors import InputError

from .spec import CODES, PagedCall, PagedSpec

DTYPES = ("bfloat16", "float16", "float32")


def make_call(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array | np.ndarray,
    lengths: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
) -> PagedCall:
    """Validates the arguments of ``paged_attention`` and returns the call; q is [B, T, N, H]."""
    _check_shapes(q, k_pages, v_pages, k_scale, v_scale)
    B, _, N, H = q.shape
    if sinks is not None and (sinks.shape != (N,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise InputError(
            f"sinks is {sinks.dtype} {sinks.shape}; it must be one float per head [{N}]"
        )
    page_tables = _integers("page_tables", page_tables, (B, None))
    if page_tables.shape[1] == 0:
        raise InputError(f"page_tables {page_tables.shape} have no room for a page of a row")
    lengths = _integers("lengths", lengths, (B,))
    if query_lengths is not None:
        query_lengths = _integers("query_lengths", query_lengths, (B,))
    return PagedCall(
        q_BTNH=q,
        k_PSKH=k_pages,
        v_PSKV=v_pages,
        k_scale_PSK=k_scale,
        v_scale_PSK=v_scale,
        tables_BM=page_tables,
        lengths_B=lengths,
        query_lengths_B=query_lengths,
        sinks_N=None if sinks is None else sinks.astype(jnp.float32),
        spec=PagedSpec(
            scale=_positive("scale", 1 / math.sqrt(H) if scale is None else scale),
            window=None if window is None else _window(window),
            soft_cap=None if soft_cap is None else _positive("soft_cap", soft_cap),
        ),
    )


def _check_shapes(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> None:
    """Raises InputError unless queries and pools agree."""
    pools = ("k_pages", k_pages, "P,S,K,H"), ("v_pages", v_pages, "P,S,K,V")
    for name, x, dims in (("q", q, "B,T,N,H"), *pools):
        if x.ndim != 4:
            raise InputError(f"{name} has shape {x.shape}; it must have four dims [{dims}]")
    packed = _check_dtypes(q, k_pages, v_pages, k_scale, v_scale)
    N, H = q.shape[2:]
    K, key_width = k_pages.shape[2], packed * k_pages.shape[3]
    if key_width != H:
        raise InputError(f"q has head width {H} and k_pages {key_width}; they must be equal")
    if min(*q.shape, *k_pages.shape) == 0 or N % K:
        raise InputError(
            f"q {q.shape} and k_pages {k_pages.shape}: the {N} query heads must share the {K} kv "
            "heads in equal groups, and no dim may be 0"
        )
    if v_pages.shape[:3] != k_pages.shape[:3] or not v_pages.shape[3]:
        raise InputError(
            f"k_pages {k_pages.shape} and v_pages {v_pages.shape} must agree in [P,S,K]"
        )


def _check_dtypes(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> int:
    """Numbers in an element of the pages: 2 where they are bytes of two codes, else 1."""
    if q.dtype.name not in DTYPES:
        raise InputError(f"q is {q.dtype}; it must be one of {', '.join(DTYPES)}")
    pools = {"k_pages": k_pages, "v_pages": v_pages}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if k_scale is None and v_scale is None:
        for name, x in pools.items():
            if x.dtype != q.dtype:
                raise InputError(
                    f"{name} is {x.dtype} and q is {q.dtype}; without scales, queries, keys and "
                    f"values must all be the same one of {', '.join(DTYPES)}"
                )
        return 1
    if k_scale is None or v_scale is None:
        raise InputError("k_scale and v_scale come together: only one was given")
    for name, x in pools.items():
        if x.dtype != k_pages.dtype or x.dtype.name not in CODES:
            raise InputError(
                f"{name} is {x.dtype} and k_pages is {k_pages.dtype}; with scales both must be the "
                f"same one of {', '.join(CODES)}"
            )
    for name, x in scales.items():
        if x is not None and (x.dtype != q.dtype or x.shape != k_pages.shape[:3]):
            raise InputError(
                f"{name} is {x.dtype} {x.shape}; it must have q's dtype {q.dtype} and a number for "
                f"each slot and head of k_pages, {k_pages.shape[:3]}"
            )
    return 8 // CODES[k_pages.dtype.name].bits


def _integers(name: str, x: jax.Array | np.ndarray, shape: tuple[int | None, ...]) -> jax.Array:
    x = jnp.asarray(x)
    fits = x.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or x.dtype != jnp.int32:
        wanted = ", ".join("M" if n is None else str(n) for n in shape)
        raise InputError(f"{name} is {x.dtype} {x.shape}; it must be int32 [{wanted}]")
    return x


def _positive(name: str, number: float) -> float:
    # A traced number cannot be part of a compiled kernel.
    if isinstance(number, jax.core.Tracer) or not 0 < number < math.inf:
        raise InputError(f"{name}={number} must be a positive Python number, known when traced")
    return float(number)


def _window(window: int) -> int:
    try:
        number = operator.index(window)
    except TypeError:
        number = 0
    if number < 1:
        raise InputError(
            f"window={window!r} must be an int of at least 1: how many keys a query sees, its own "
            "position's among them"
        )
    return number
