"""Writes new keys and values to pages, with RoPE on the keys, and optionally on the queries.

Dims: B row, T new token, K kv heads, H key width, V value width, P page of the pool, S slot of a
page, M page of a row, R rotated pair.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.chosen import announce, choose
from pallas_kernels.common.errors import InputError
from pallas_kernels.quantized_weight import WeightCode

from .codes import codes_of
from .hopper import append_heads_hopper, unsupported_append
from .spec import CODES

type AppendImplementation = Literal["auto", "hopper", "xla"]


def append_to_pages(
    k_new: jax.Array,
    v_new: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens' keys and values into page pools at their positions, in place if donated.

    Args:
        k_new: [B, T, K, H], cast to the pool's dtype.
        v_new: [B, T, K, V].
        k_pages: [P, S, K, H].
        v_pages: [P, S, K, V].
        page_tables: int32 [B, M], page numbers; below 0 where a row has no page.
        positions: int32 [B, T]. A token at a position below 0, or without a page, is not written.
        rope: cos and sin, float32 [B, T, R]: pairs (i, i + R) of the keys' first 2 R columns are
            rotated, in float32.

    Returns:
        ``k_pages`` and ``v_pages``, of their shapes and dtypes.

    Raises:
        InputError: shapes that disagree.

    Examples:
        A row of 3 tokens in 2 pages of 2 slots, whose pages are 1 and 0 of the pool:

        >>> new, pool = jnp.ones((1, 3, 1, 4)), jnp.zeros((2, 2, 1, 4))
        >>> tables, positions = jnp.array([[1, 0]]), jnp.array([[0, 1, 2]])
        >>> k, _ = pallas_kernels.append_to_pages(new, new, pool, pool, tables, positions)
        >>> k[..., 0, 0].tolist()
        [[1.0, 0.0], [1.0, 1.0]]
    """
    for name, x, pages in (("k_new", k_new, k_pages), ("v_new", v_new, v_pages)):
        if x.shape[:2] != positions.shape or x.shape[2:] != pages.shape[2:]:
            raise InputError(
                f"{name} has shape {x.shape}; positions {positions.shape} and pages {pages.shape} "
                f"ask for {(*positions.shape, *pages.shape[2:])}"
            )
    if page_tables.shape[0] != positions.shape[0]:
        raise InputError(f"page_tables {page_tables.shape} and positions {positions.shape}: "
                         "one row each")  # fmt: skip
    if rope is not None:
        k_new = _rotated(k_new, *rope)
    num_pages, size = k_pages.shape[:2]
    places_BT, slots_BT = jnp.divmod(positions, size)
    pages_BT = jnp.take_along_axis(page_tables, places_BT, axis=1, mode="fill", fill_value=-1)
    pages_BT = jnp.where((positions < 0) | (pages_BT < 0), num_pages, pages_BT)

    def appended(pages: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.asarray(pages).at[pages_BT, slots_BT].set(x.astype(pages.dtype), mode="drop")

    return appended(k_pages, k_new), appended(v_pages, v_new)


def append_heads(
    heads: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array | np.ndarray,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: AppendImplementation = "auto",
    is_ordered: bool = False,
) -> tuple[jax.Array, ...]:
    """Rotates (RoPE) queries and keys of a packed QKV product; writes keys and values to pages.

    On a Hopper GPU, one kernel does the work of ``append_to_pages`` and the rotation of queries,
    and writes in place into donated pools. There is no gradient.

    Args:
        heads: [B, T, N + 2 K, H]: the product's heads of queries, then of keys, then of values.
        k_pages, v_pages: [P, S, K, H], or codes as ``paged_attention`` reads them.
        page_tables: int32 [B, M], page numbers; below 0 where a row has no page.
        positions: int32 [B, T]. A token at a position below 0, or without a page, is not written;
            its query in the result is undefined.
        rope: cos and sin, float32 [B or 1, T, R]; pairs as in ``append_to_pages``.
        k_scale, v_scale: [P, S, K], for pages of codes; a head's scale maps its largest element to
            the largest code.
        implementation: "hopper" (heads in multiples of 4, of 64, 128 or 256 columns, all rotated),
            "xla", or "auto": hopper if it supports the call, else xla.
        is_ordered: round each product of the kernel's rotation before it is added.

    Returns:
        Queries [B, T, N, H], ``k_pages`` and ``v_pages``; ``k_scale`` and ``v_scale`` where given.

    Raises:
        InputError: shapes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot take this call.

    Examples:
        >>> heads, pool = jnp.ones((1, 1, 4, 4)), jnp.zeros((2, 2, 1, 4))
        >>> rope = jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2))
        >>> tables, positions = jnp.array([[1]]), jnp.array([[1]])
        >>> q, k, _ = pallas_kernels.append_heads(heads, pool, pool, tables, positions, rope)
        >>> q.shape, k[..., 0, 0].tolist()
        ((1, 1, 2, 4), [[0.0, 0.0], [0.0, 1.0]])
    """
    page_tables = jnp.asarray(page_tables)
    num_kv_heads = k_pages.shape[2]
    num_q_heads = heads.shape[2] - 2 * num_kv_heads
    pools = {"k": k_pages, "v": v_pages}
    pools |= {n: x for n, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    code = _code(pools)
    width = k_pages.shape[3] * (1 if code is None else 8 // code.bits)
    if num_q_heads < 1 or k_pages.shape != v_pages.shape or heads.shape[3] != width:
        raise InputError(
            f"heads {heads.shape} and pages {k_pages.shape}, {v_pages.shape}: [B, T, N + 2 K, H] "
            "go into pools [P, S, K, H]"
        )
    if heads.shape[:2] != positions.shape or page_tables.shape[:1] != positions.shape[:1]:
        raise InputError(
            f"heads {heads.shape}, positions {positions.shape} and page_tables "
            f"{page_tables.shape}: positions are [B, T] as heads begin, and tables [B, M]"
        )
    why_not = functools.partial(unsupported_append, heads, k_pages, rope, code)
    name = choose("append", implementation, ("hopper", "xla"), why_not)
    if implementation == "auto":
        case = f"{heads.dtype}{list(heads.shape)} into {k_pages.dtype} pages {list(k_pages.shape)}"
        because = None if name == "hopper" else f"not hopper: {why_not()}"
        announce("append_heads", name, case, because=because)
    if name == "hopper":
        return append_heads_hopper(
            heads, pools, page_tables, positions, rope, code=code, is_ordered=is_ordered
        )
    q, k, v = jnp.split(heads, (num_q_heads, num_q_heads + num_kv_heads), axis=2)
    cos, sin = (jnp.broadcast_to(x, (*positions.shape, x.shape[-1])) for x in rope)
    new = {"k": _rotated(k, cos, sin), "v": v}
    if code is not None:
        for name in ("k", "v"):
            dtype = pools[f"{name}_scale"].dtype
            new[name], new[f"{name}_scale"] = codes_of(new[name], code, dtype)
    done = [_rotated(q, cos, sin)]
    for k, v in [("k", "v"), ("k_scale", "v_scale")][: len(pools) // 2]:
        done += append_to_pages(new[k], new[v], pools[k], pools[v], page_tables, positions)
    return tuple(done)


def _code(pools: dict[str, jax.Array]) -> WeightCode | None:
    """Code of pools with scales; None of pools without."""
    scales = [x for name, x in pools.items() if name.endswith("_scale")]
    if not scales:
        return None
    pages = pools["k"]
    if len(scales) == 1 or pages.dtype.name not in CODES or pools["v"].dtype != pages.dtype:
        raise InputError(
            f"pages {pages.dtype} and {pools['v'].dtype} with {len(scales)} scales: k_scale and "
            f"v_scale come together, and pages are both one of {', '.join(CODES)}"
        )
    for scale in scales:
        if scale.shape != pages.shape[:3] or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise InputError(
                f"scales are {scale.dtype} {scale.shape}; pages {pages.shape} ask for floats "
                f"{pages.shape[:3]}"
            )
    return CODES[pages.dtype.name]


def _rotated(x_BTKH: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array) -> jax.Array:
    num_pairs = cos_BTR.shape[-1]
    if (
        cos_BTR.shape != sin_BTR.shape
        or cos_BTR.shape[:2] != x_BTKH.shape[:2]
        or (2 * num_pairs > x_BTKH.shape[3])
    ):
        raise InputError(
            f"rope is cos {cos_BTR.shape} and sin {sin_BTR.shape}; keys {x_BTKH.shape} ask for "
            f"{(*x_BTKH.shape[:2], 'R')}, with 2 R at most {x_BTKH.shape[3]}"
        )
    cos_BT1R, sin_BT1R = cos_BTR[:, :, None], sin_BTR[:, :, None]
    first, second, kept = jnp.split(x_BTKH, (num_pairs, 2 * num_pairs), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = (first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R)
    return jnp.concatenate([x.astype(x_BTKH.dtype) for x in rotated] + [kept], axis=-1)
