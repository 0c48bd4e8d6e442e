"""Segment ids and lengths as the Hopper kernels want them: one id per token, and tiles to skip.

Dims: B batch, T query position, S key position, I tiles of the outer side.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.spec import AttentionMasks

from .tiles import Geometry

PADDED_QUERY, PADDED_KEY = -1, -2  # different, so that padding never matches padding


def have_ids(masks: AttentionMasks) -> bool:
    """Whether the call has segments or lengths."""
    ids = {"q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths"}
    return not ids.isdisjoint(masks.arrays().keys())


def token_ids(
    masks: AttentionMasks, g: Geometry, *, q_tile: int, kv_tile: int, by_keys: bool = False
) -> dict[str, jax.Array]:
    """Operands by name; {} where the call has neither segments nor lengths.

    "q_ids" [B, T'] and "kv_ids" [B, S'] are padded to whole tiles, and equal ids see each other;
    "ranges" are those of each query tile, or of each key tile if ``by_keys``.
    """
    B, T, S = g.B, g.T, g.S
    if not have_ids(masks):
        return {}
    q = _ids(masks.q_segment_ids, masks.q_lengths, (B, T), PADDED_QUERY)
    kv = _ids(masks.kv_segment_ids, masks.kv_lengths, (B, S), PADDED_KEY)
    q = jnp.pad(q, ((0, 0), (0, -T % q_tile)), constant_values=PADDED_QUERY)
    kv = jnp.pad(kv, ((0, 0), (0, -S % kv_tile)), constant_values=PADDED_KEY)
    sides = (kv, q, kv_tile, q_tile) if by_keys else (q, kv, q_tile, kv_tile)
    return {"q_ids": q, "kv_ids": kv, "ranges": tile_ranges(*sides)}


def _ids(
    segments: jax.Array | None, lengths: jax.Array | None, shape: tuple[int, int], padding: int
) -> jax.Array:
    ids = jnp.zeros(shape, jnp.int32) if segments is None else segments.astype(jnp.int32)
    ids = jnp.where(ids < 0, padding, ids)
    if lengths is None:
        return ids
    return jnp.where(jnp.arange(shape[1])[None, :] < lengths[:, None], ids, padding)


def tile_ranges(outer_ids: jax.Array, inner_ids: jax.Array, outer: int, inner: int) -> jax.Array:
    """For each outer tile, the inner tiles to visit: int32 [B, I, 4] of (lo, full_lo, full_hi, hi).

    Tiles outside lo..hi share no id with it, as far as the least and greatest ids tell; tiles of
    full_lo..full_hi need no mask. Exact for documents packed one after another.
    """
    o_lo, o_hi, o_whole = _extent(outer_ids, outer)
    i_lo, i_hi, i_whole = _extent(inner_ids, inner)
    touches = (i_lo[:, None] <= o_hi[..., None]) & (i_hi[:, None] >= o_lo[..., None])
    same = i_lo[:, None] == o_lo[..., None]
    whole = touches & same & i_whole[:, None] & o_whole[..., None]
    lo, hi = _first(touches, touches.shape[2]), _last_end(touches)
    full_lo = jnp.minimum(_first(whole, touches.shape[2]), hi)
    after = jnp.arange(touches.shape[2])[None, None, :] >= full_lo[..., None]
    full_hi = jnp.minimum(_first(after & ~whole, touches.shape[2]), hi)
    return jnp.stack([jnp.minimum(lo, hi), full_lo, full_hi, hi], axis=-1).astype(jnp.int32)


def _extent(ids: jax.Array, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Least and greatest id of each tile's tokens, and whether all have one and the same id."""
    tiles = ids.reshape(ids.shape[0], -1, tile)
    least = jnp.where(tiles < 0, jnp.iinfo(jnp.int32).max, tiles).min(axis=-1)
    greatest = tiles.max(axis=-1)
    return least, jnp.where(greatest < 0, -1, greatest), (tiles == tiles[..., :1]).all(axis=-1)


def _first(mask: jax.Array, default: int) -> jax.Array:
    return jnp.where(mask.any(axis=-1), jnp.argmax(mask, axis=-1), default)


def _last_end(mask: jax.Array) -> jax.Array:
    size = mask.shape[-1]
    return jnp.where(mask.any(axis=-1), size - jnp.argmax(mask[..., ::-1], axis=-1), 0)
