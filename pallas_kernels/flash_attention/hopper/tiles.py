"""Where tiles lie: order of tiles in the grid, and the inner tiles that the positional masks leave.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.spec import AttentionSpec

# Heads whose keys and values stay in L2 together (50 MB, of which other traffic takes a share).
L2_BYTES = 24 * 2**20
# Of all heads of a wave of the backward; 8 heads of 2048 and 4 of 4096 were fastest on an H200.
WAVE_KEYS = 16384


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of one call."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.N // self.K

    @property
    def diagonal(self) -> int:
        """Query t is aligned with key t + diagonal."""
        return self.S - self.T


def geometry_of(q: jax.Array, v: jax.Array) -> Geometry:
    """Reads the sizes off the operands."""
    (B, T, N, H), (_, S, K, Hv) = q.shape, v.shape
    return Geometry(B=B, T=T, S=S, N=N, K=K, H=H, Hv=Hv)


def pad_rows(x: jax.Array) -> jax.Array:
    """x [B, T, N, H] with T a multiple of 8: the copy engine moves tiles of 8 rows."""
    return x if x.shape[1] % 8 == 0 else jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))


def pad_width(x: jax.Array, multiple: int) -> jax.Array:
    """x [B, T, N, H] with H a multiple of a number, by zeros at the end.

    They change no score, and what they come to in results is cut off.
    """
    missing = -x.shape[3] % multiple
    return jnp.pad(x, ((0, 0),) * 3 + ((0, missing),)) if missing else x


@dataclasses.dataclass(frozen=True, slots=True)
class TileRange:
    """Inner tiles lo..hi to visit, of which full_lo..full_hi need no mask."""

    lo: jax.Array
    full_lo: jax.Array
    full_hi: jax.Array
    hi: jax.Array

    def meet(self, ids_gmem, b: jax.Array, tile: jax.Array) -> "TileRange":
        """The intersection with what ``token_ids.tile_ranges`` found."""
        lo, full_lo, full_hi, hi = (ids_gmem[b, tile, i] for i in range(4))
        return TileRange(
            jnp.maximum(self.lo, lo),
            jnp.maximum(self.full_lo, full_lo),
            jnp.minimum(self.full_hi, full_hi),
            jnp.minimum(self.hi, hi),
        )

    def after(self, i: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tile and head after tile i of a head, each head having these tiles."""
        last = i + 1 == self.hi
        return jnp.where(last, self.lo, i + 1), head + last.astype(jnp.int32)

    def is_whole(self, i: jax.Array) -> jax.Array:
        """Whether tile i needs no mask."""
        return (i >= self.full_lo) & (i < self.full_hi)

    def ordered(self, at_least_one: bool) -> "TileRange":
        """The same tiles with lo <= full_lo <= full_hi <= hi; an empty range can become one."""
        hi = jnp.maximum(self.hi, 1 if at_least_one else 0)
        lo = jnp.clip(self.lo, 0, hi - 1 if at_least_one else hi)
        full_lo = jnp.clip(self.full_lo, lo, hi)
        return TileRange(lo, full_lo, jnp.clip(self.full_hi, full_lo, hi), hi)


def key_tiles(
    spec: AttentionSpec, g: Geometry, q0: jax.Array, q_tile: int, kv_tile: int
) -> TileRange:
    """Key tiles that queries q0 .. q0 + q_tile see."""
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
    """Query tiles that see any of keys k0 .. k0 + kv_tile."""
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
    """Batch entry, key/value head and key tile of block ``tile`` of a backward.

    Blocks of the same head in flight read the same queries and add to the same dQ at about the
    same time, which L2 then serves: so heads go in waves, not all of them side by side. Within a
    wave the first keys come first, which under a causal mask are seen by the most queries.
    """
    heads = g.B * g.K
    wanted = min(heads, max(1, WAVE_KEYS // g.S))
    wave = max(n for n in range(1, wanted + 1) if heads % n == 0)
    first, inside = lax.div(tile, wave * num_k_tiles), lax.rem(tile, wave * num_k_tiles)
    head = first * wave + lax.rem(inside, wave)
    return lax.div(head, g.K), lax.rem(head, g.K), lax.div(inside, wave)


def heads_per_wave(heads: int, group: int, kv_head_bytes: int) -> int:
    """How many query heads run side by side: whole groups whose keys and values fit in L2."""
    wanted = group * max(1, L2_BYTES // kv_head_bytes)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(wanted, group))
