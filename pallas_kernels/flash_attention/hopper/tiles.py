"""Order in which blocks compute tiles, and the range of tiles that each block must visit.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value; I outer tiles, which blocks own (inner: visited).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec

# Heads whose keys and values stay in L2 together (50 MB, of which other traffic takes a share).
L2_BYTES = 24 * 2**20
# Of all heads of a wave of the backward; 8 heads of 2048 and 4 of 4096 were fastest on an H200.
WAVE_KEYS = 16384
PADDED_QUERY, PADDED_KEY = -1, -2  # ids; different, so that padding never matches padding


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of one attention call: batch, lengths, heads and widths."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    @property
    def group(self) -> int:
        """Number of query heads per key/value head."""
        return self.N // self.K

    @property
    def diagonal(self) -> int:
        """Offset of keys to queries: query t is aligned with key t + diagonal."""
        return self.S - self.T


def geometry_of(q: jax.Array, v: jax.Array) -> Geometry:
    """Returns the sizes of an attention call, read off q and v."""
    (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
    return Geometry(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv)


def pad_rows(x: jax.Array) -> jax.Array:
    """Pads x [B, T, N, H] with rows until T is a multiple of 8, as TMA moves tiles of 8 rows."""
    return x if x.shape[1] % 8 == 0 else jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))


def pad_width(x: jax.Array, multiple: int) -> jax.Array:
    """Pads x [B, T, N, H] with zero columns until H is a multiple of ``multiple``.

    Zero columns change no score; the result's padded columns are cut off.
    """
    missing = -x.shape[3] % multiple
    return jnp.pad(x, ((0, 0),) * 3 + ((0, missing),)) if missing else x


@dataclasses.dataclass(frozen=True, slots=True)
class TileRange:
    """Range lo..hi of inner tiles to visit, of which full_lo..full_hi need no mask."""

    lo: jax.Array
    full_lo: jax.Array
    full_hi: jax.Array
    hi: jax.Array

    def meet(self, ids_gmem, b: jax.Array, tile: jax.Array) -> "TileRange":
        """Returns the intersection of this range and that of ``tile_ranges`` for a tile."""
        lo, full_lo, full_hi, hi = (ids_gmem[b, tile, i] for i in range(4))
        return TileRange(
            jnp.maximum(self.lo, lo),
            jnp.maximum(self.full_lo, full_lo),
            jnp.minimum(self.full_hi, full_hi),
            jnp.minimum(self.hi, hi),
        )

    def after(self, i: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the next tile to visit and its head; after the last tile comes the next head."""
        last = i + 1 == self.hi
        return jnp.where(last, self.lo, i + 1), head + last.astype(jnp.int32)

    def is_whole(self, i: jax.Array) -> jax.Array:
        """Tells whether tile i needs no mask."""
        return (i >= self.full_lo) & (i < self.full_hi)

    def ordered(self, at_least_one: bool) -> "TileRange":
        """Clips bounds to lo <= full_lo <= full_hi <= hi; an empty range may become one tile."""
        hi = jnp.maximum(self.hi, 1 if at_least_one else 0)
        lo = jnp.clip(self.lo, 0, hi - 1 if at_least_one else hi)
        full_lo = jnp.clip(self.full_lo, lo, hi)
        return TileRange(lo, full_lo, jnp.clip(self.full_hi, full_lo, hi), hi)


def key_tiles(
    spec: AttentionSpec, g: Geometry, q0: jax.Array, q_tile: int, kv_tile: int
) -> TileRange:
    """Returns the range of key tiles that queries q0 .. q0 + q_tile see."""
    lo = full_lo = jnp.int32(0)
    hi, full_hi = jnp.int32(-(-g.S // kv_tile)), jnp.int32(g.S // kv_tile)
    first, last = q0 + g.diagonal, jnp.minimum(q0 + q_tile, g.T) - 1 + g.diagonal
    if spec.right is not None:
        hi = jnp.minimum(hi, _ceil(last + spec.right + 1, kv_tile))
        full_hi = jnp.minimum(full_hi, _floor(first + spec.right + 1, kv_tile))
    if spec.left is not None:
        lo = _floor(first - spec.left, kv_tile)
        full_lo = _ceil(last - spec.left, kv_tile)
    return TileRange(lo, full_lo, full_hi, hi)


def query_tiles(
    spec: AttentionSpec, g: Geometry, k0: jax.Array, kv_tile: int, q_tile: int
) -> TileRange:
    """Returns the range of query tiles that see any of keys k0 .. k0 + kv_tile."""
    lo = full_lo = jnp.int32(0)
    hi = full_hi = jnp.int32(-(-g.T // q_tile))
    first, last = k0 - g.diagonal, k0 + kv_tile - 1 - g.diagonal
    if spec.right is not None:
        lo = _floor(first - spec.right, q_tile)
        full_lo = _ceil(last - spec.right, q_tile)
    if spec.left is not None:
        hi = jnp.minimum(hi, _floor(last + spec.left, q_tile) + 1)
        full_hi = jnp.minimum(full_hi, _floor(first + spec.left + 1, q_tile))
    if g.S % kv_tile:  # keys past the end are masked, for exp2(0 - logsumexp) can overflow
        full_lo = jnp.where(k0 + kv_tile > g.S, hi, full_lo)
    return TileRange(lo, full_lo, full_hi, hi)


def _floor(x: jax.Array, tile: int) -> jax.Array:
    return lax.div(jnp.maximum(x, 0), jnp.int32(tile))


def _ceil(x: jax.Array, tile: int) -> jax.Array:
    return _floor(x + (tile - 1), tile)


def key_tile_of(
    tile: jax.Array, g: Geometry, num_k_tiles: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns batch entry, key/value head and key tile of block ``tile`` of a backward kernel.

    Blocks of one head that run at the same time read the same queries and add to the same dQ in L2.
    So heads run in waves of a few, not all together. In a wave the first keys come first, since
    under a causal mask the most queries see them.
    """
    heads = g.B * g.K
    wanted = min(heads, max(1, WAVE_KEYS // g.S))
    wave = max(n for n in range(1, wanted + 1) if heads % n == 0)
    first, inside = lax.div(tile, wave * num_k_tiles), lax.rem(tile, wave * num_k_tiles)
    head = first * wave + lax.rem(inside, wave)
    return lax.div(head, g.K), lax.rem(head, g.K), lax.div(inside, wave)


def heads_per_wave(heads: int, group: int, kv_head_bytes: int) -> int:
    """Returns how many query heads run at a time: kv groups whose keys and values fit in L2."""
    wanted = group * max(1, L2_BYTES // kv_head_bytes)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(wanted, group))


def have_ids(masks: AttentionMasks) -> bool:
    """Tells whether the call has segment ids or sequence lengths."""
    ids = {"q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths"}
    return not ids.isdisjoint(masks.arrays().keys())


def token_ids(
    masks: AttentionMasks, g: Geometry, *, q_tile: int, kv_tile: int, by_keys: bool = False
) -> dict[str, jax.Array]:
    """Returns token ids as kernel operands by name; {} if the call has no segments or lengths.

    "q_ids" [B, T'] and "kv_ids" [B, S'] are padded to whole tiles; a query sees keys of its own id.
    "ranges" has the ``tile_ranges`` of each query tile, or of each key tile if ``by_keys``.
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
    """Returns the inner tiles to visit per outer tile: int32 [B, I, 4] (lo, full_lo, full_hi, hi).

    By their least and greatest ids, tiles outside lo..hi have no id of the outer tile; tiles in
    full_lo..full_hi need no mask. This is exact for documents packed one after another.
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
    """Returns the least and greatest id of each tile's tokens, and whether all ids are equal."""
    tiles = ids.reshape(ids.shape[0], -1, tile)
    least = jnp.where(tiles < 0, jnp.iinfo(jnp.int32).max, tiles).min(axis=-1)
    greatest = tiles.max(axis=-1)
    return least, jnp.where(greatest < 0, -1, greatest), (tiles == tiles[..., :1]).all(axis=-1)


def _first(mask: jax.Array, default: int) -> jax.Array:
    return jnp.where(mask.any(axis=-1), jnp.argmax(mask, axis=-1), default)


def _last_end(mask: jax.Array) -> jax.Array:
    size = mask.shape[-1]
    return jnp.where(mask.any(axis=-1), size - jnp.argmax(mask[..., ::-1], axis=-1), 0)
