"""Public function of paged attention: it checks a call and chooses its implementation."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.chosen import announce, choose

from .hopper import (
    is_chunk,
    numbers_first,
    ordered_attention,
    paged_attention_hopper,
    unsupported,
)
from .reference import paged_attention_reference
from .spec import PagedCall
from .validate import make_call
from .xla import paged_attention_xla

type PagedImplementation = Literal["auto", "hopper", "xla", "reference"]

_IMPLEMENTATIONS = {
    "hopper": paged_attention_hopper,
    "xla": paged_attention_xla,
    "reference": paged_attention_reference,
}


def paged_attention(
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
    implementation: PagedImplementation = "auto",
    is_ordered: bool = False,
) -> jax.Array:
    """Computes attention of each row's newest tokens over all keys and values in the row's pages.

    Position p of row b is in slot ``p % S`` of page ``page_tables[b, p // S]``. The queries are at
    the row's last positions; each sees positions up to its own. There is no gradient, as this is
    for generation. The kernels are custom calls: on a mesh, call this inside ``shard_map``.

    Args:
        q: bfloat16, float16 or float32 [B, N, H], or [B, T, N, H] for T queries per row.
        k_pages: [P, S, K, H] of q's dtype: a pool of P pages of S slots; K divides N. If quantized
            (with ``k_scale``), codes: float8_e4m3fn, int8, or uint8 [P, S, K, H / 2]. A uint8 packs
            two 4-bit codes, each stored plus 8, with those of a head's first half in the low bits.
        v_pages: [P, S, K, V], of the keys' dtype.
        page_tables: int32 [B, M]: page numbers; entries beyond a row's length are ignored.
        lengths: int32 [B]: number of positions in the row's pages, including its queries'.
        k_scale, v_scale: [P, S, K] of q's dtype, for quantized pages: an element is its code times
            the scale of its slot and head.
        query_lengths: int32 [B]: how many of a row's T queries are valid, from the first on;
            default T. Results of the others are 0.
        window: most keys that a query sees, counting the key at its own position.
        soft_cap: scores become ``cap * tanh(scale * q k^T / cap)``.
        sinks: floats [N]: one logit per head that joins the softmax's denominator, without a value.
        scale: factor of the scores; default 1 / sqrt(H).
        implementation: "hopper" (Mosaic GPU kernels), "xla" (a loop over pages, linear memory) and
            "reference" (the formula, all pages at once) compute the call themselves or raise.
            "auto" takes hopper if it supports the call, else xla, and logs its choice once.
        is_ordered: add keys in the order of ``flash_attention`` by its Hopper kernel, so that a
            query's result has the same bits; without ``auto``'s choice, codes and, for one query
            per row, sinks.

    Returns:
        [B, N, V] or [B, T, N, V] in q's dtype. The result of a query that sees no key, as in a row
        of length 0, is 0.

    Raises:
        InputError: shapes, dtypes or options that disagree.
        UnsupportedError: the named implementation cannot compute this call.

    Examples:
        One row of 3 tokens, in pages 1 and 0 of a pool of 2 pages with 2 slots:

        >>> q, pool = jnp.ones((1, 4, 8)), jnp.ones((2, 2, 2, 8))
        >>> tables, lengths = jnp.array([[1, 0]]), jnp.array([3])
        >>> pallas_kernels.paged_attention(q, pool, pool, tables, lengths).shape
        (1, 4, 8)
    """
    q, k_pages, v_pages = map(jnp.asarray, (q, k_pages, v_pages))
    k_scale, v_scale = (None if x is None else jnp.asarray(x) for x in (k_scale, v_scale))
    call = make_call(
        q[:, None] if q.ndim == 3 else q, k_pages, v_pages, page_tables, lengths,
        k_scale=k_scale, v_scale=v_scale, query_lengths=query_lengths, window=window,
        soft_cap=soft_cap, sinks=sinks, scale=scale,
    )  # fmt: skip
    out_BTNV = ordered_attention(call) if is_ordered else _compute(implementation, call)
    return out_BTNV[:, 0] if q.ndim == 3 else out_BTNV


def attends_chunk(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_tables: jax.Array | np.ndarray
) -> bool:
    """Tells whether the Hopper kernel for chunks of a prompt takes a call with these queries.

    Arguments are those of ``paged_attention``; the pages are not quantized.
    """
    call = make_call(q, k_pages, v_pages, page_tables, jnp.zeros(len(q), jnp.int32))
    return unsupported(call) is None and is_chunk(call)


def _compute(implementation: str, call: PagedCall) -> jax.Array:
    what = f"paged attention ({call.describe()})"
    name = choose(what, implementation, [*_IMPLEMENTATIONS], lambda: unsupported(call))
    if implementation == "auto":
        is_hopper = name == "hopper"
        because = numbers_first(call) if is_hopper else f"not hopper: {unsupported(call)}"
        announce("paged_attention", name, call.describe(), because=because)
    return _IMPLEMENTATIONS[name](call)
