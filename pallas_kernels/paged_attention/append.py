"""New keys and values into pages, keys rotated on their way.

Dims: B row, T new token, K kv heads, H key width, V value width, P page of the pool, S slot of a
page, M page of a row, R rotated pair.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError


def append_to_pages(
    k_new: jax.Array,
    v_new: jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_tables: jax.Array,
    positions: jax.Array,
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The pools with new tokens in the slots of their positions; donate the pools.

    Args:
        k_new: [B, T, K, H], cast to the pool's dtype.
        v_new: [B, T, K, V]; None where values are part of the keys.
        k_pages: [P, S, K, H].
        v_pages: [P, S, K, V]; None with ``v_new``.
        page_tables: int32 [B, M]; below 0 where a row has no page.
        positions: int32 [B, T]. A token below 0, or where its row has no page, leaves nothing.
        rope: cos and sin, float32 [B, T, R]: pairs (i, i + R) of the keys' first 2 R columns are
            turned, in float32.

    Returns:
        ``k_pages`` and ``v_pages`` (None where none were given), of their shapes and dtypes.

    Raises:
        InputError: shapes that disagree.

    Examples:
        A row of 3 tokens in 2 pages of 2 slots, whose pages are 1 and 0 of the pool:

        >>> new, pool = jnp.ones((1, 3, 1, 4)), jnp.zeros((2, 2, 1, 4))
        >>> tables, positions = jnp.array([[1, 0]]), jnp.array([[0, 1, 2]])
        >>> k, _ = pallas_kernels.append_to_pages(new, None, pool, None, tables, positions)
        >>> k[..., 0, 0].tolist()
        [[1.0, 0.0], [1.0, 1.0]]
    """
    if (v_new is None) != (v_pages is None):
        raise InputError("v_new and v_pages come together: only one was given")
    new = [("k_new", k_new, k_pages)]
    if v_new is not None and v_pages is not None:
        new.append(("v_new", v_new, v_pages))
    for name, x, pages in new:
        if x.shape[:2] != positions.shape or x.shape[2:] != pages.shape[2:]:
            raise InputError(
                f"{name} has shape {x.shape}; positions {positions.shape} and pages {pages.shape} "
                f"ask for {(*positions.shape, *pages.shape[2:])}"
            )
    if page_tables.shape[0] != positions.shape[0]:
        raise InputError(f"page_tables {page_tables.shape} and positions {positions.shape}: "
                         "one row each")  # fmt: skip
    if rope is not None:
        k_new = _turned(k_new, *rope)
    num_pages, size = k_pages.shape[:2]
    places_BT, slots_BT = jnp.divmod(positions, size)
    pages_BT = jnp.take_along_axis(page_tables, places_BT, axis=1, mode="fill", fill_value=-1)
    pages_BT = jnp.where((positions < 0) | (pages_BT < 0), num_pages, pages_BT)

    def appended(pages: jax.Array, x: jax.Array) -> jax.Array:
        return pages.at[pages_BT, slots_BT].set(x.astype(pages.dtype), mode="drop")

    k_pages = appended(k_pages, k_new)
    if v_new is None or v_pages is None:
        return k_pages, None
    return k_pages, appended(v_pages, v_new)


def _turned(x_BTKH: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array) -> jax.Array:
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
    turned = (first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R)
    return jnp.concatenate([x.astype(x_BTKH.dtype) for x in turned] + [kept], axis=-1)
