"""Attention of many new tokens per row over its pages: flash attention that reads page tables.

``attend`` is bound by reading pages: its tiles have a few tokens with all query heads of a kv head.
A chunk of a prompt is bound by the products. So a tile here has 128 tokens of one head, as in
training; only the addresses of keys come from page tables. Keys of a row are not split over blocks.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.flash_attention.hopper.config import (
    FORWARD_WIDTH,
    WIDTHS,
    ForwardConfig,
    exceeds_shared_memory,
    forward_config,
)
from pallas_kernels.flash_attention.hopper.forward_kernel import ForwardKernel
from pallas_kernels.flash_attention.hopper.tiles import Geometry, TileRange, pad_rows
from pallas_kernels.flash_attention.spec import AttentionSpec
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E, STRIP, row_layout, strips, tile_layout
from pallas_kernels.paged_attention.spec import PagedCall

from .attend import clean
from .reader import PagePieces

LEAST_TOKENS, LEAST_TILES = 128, 32
"""Least tokens per row, and query tiles, for this kernel; with fewer, split rows are faster."""


def is_chunk(call: PagedCall) -> bool:
    """Tells whether this kernel takes a call that ``forward.unsupported`` accepts."""
    B, T, N, H = call.q_BTNH.shape
    if not _fits(call):
        return False
    config = forward_config(H, call.value_width)
    return T >= LEAST_TOKENS and B * N * -(-T // config.block_q) >= LEAST_TILES


def _fits(call: PagedCall) -> bool:
    """Tells whether pages and widths are those of this kernel."""
    H, V, size = call.q_BTNH.shape[3], call.value_width, call.size
    is_16_bit = call.q_BTNH.dtype.itemsize == 2 and call.code is None
    if not is_16_bit or f"{H}/{V}" not in WIDTHS:
        return False
    config = forward_config(H, V)
    fits = config.block_kv % size == 0 or size % config.block_kv == 0
    whole = H % FORWARD_WIDTH == V % FORWARD_WIDTH == 0
    return fits and whole and exceeds_shared_memory(config, H, V) is None


def attend_chunk(
    call: PagedCall, *, config: ForwardConfig | None = None, interpretable: bool = False
) -> jax.Array:
    """Computes attention of a call that ``is_chunk`` accepts: [B, T, N, V] in the queries' dtype.

    Args:
        config: tile sizes; None takes those of ``flash_attention``.
        interpretable: see ``flash_attention.hopper.forward_kernel.forward``.
    """
    return _attended(call, _Chunk, config=config, interpretable=interpretable)


def ordered_attention(call: PagedCall) -> jax.Array:
    """Computes attention of tokens in the order of ``flash_attention``'s kernel: [B, T, N, V].

    Raises:
        UnsupportedError: a call that this kernel cannot compute.
    """
    T, H, V, size = call.q_BTNH.shape[1], call.q_BTNH.shape[3], call.value_width, call.size
    reason = device.why_not_one_hopper() or device.miscompiled(device.CAUSAL_ATTENTION)
    if reason is None and not _fits(call):
        reason = f"pages of {size} {call.q_BTNH.dtype} slots with heads of {H}/{V}"
    if reason is None and T == 1 and (call.sinks_N is not None or call.group > LEAST_TOKENS):
        reason = f"one query per row with sinks, or with {call.group} heads to a kv head"
    if reason is not None:
        raise UnsupportedError(f"attention in one order: {reason}")
    return attend_token(call) if T == 1 else attend_chunk(call)


def attend_token(
    call: PagedCall, *, config: ForwardConfig | None = None, interpretable: bool = False
) -> jax.Array:
    """Computes attention of one token per row as ``attend_chunk`` would, to the last bit.

    A tile has the query heads of a kv head in place of tokens, all at the row's last position. So
    keys are read once per kv head, in the order of ``flash_attention``, and never split.

    Args:
        call: a call of one query per row, without sinks, whose widths ``is_chunk`` accepts.
    """
    B, _, N, H = call.q_BTNH.shape
    K, V = call.k_PSKH.shape[2], call.value_width
    q_BGKH = call.q_BTNH.reshape(B, K, N // K, H).swapaxes(1, 2)
    heads = dataclasses.replace(call, q_BTNH=q_BGKH)
    out_BGKV = _attended(heads, _Token, config=config, interpretable=interpretable)
    return out_BGKV.swapaxes(1, 2).reshape(B, 1, N, V)


def _attended(
    call: PagedCall,
    kind: "type[_Chunk]",
    *,
    config: ForwardConfig | None,
    interpretable: bool,
) -> jax.Array:
    B, T, N, H = call.q_BTNH.shape
    _, size, K, _ = call.k_PSKH.shape
    spec, V = call.spec, call.value_width
    config = config or forward_config(H, V)
    q = pad_rows(call.q_BTNH)
    lengths_B = jnp.clip(call.lengths_B, 0, call.capacity)
    queries_B = jnp.full((B,), T, jnp.int32)
    if call.query_lengths_B is not None:
        queries_B = jnp.clip(call.query_lengths_B, 0, T)
    operands = {
        "q": q,
        "k": call.k_PSKH,
        "v": call.v_PSKV,
        "tables": jnp.asarray(call.tables_BM),
        # A row's first query is at this position, and it has so many.
        "rows": kind.rows(lengths_B, queries_B),
    }
    if call.sinks_N is not None:
        operands["sinks"] = call.sinks_N.astype(jnp.float32) * LOG2E
    kernel = kind(
        g=Geometry(B=B, T=T, S=call.capacity, N=N, K=K, H=H, Hv=V),
        spec=AttentionSpec(
            scale=spec.scale,
            left=None if spec.window is None else spec.window - 1,
            right=0,
            logit_soft_cap=spec.soft_cap,
        ),
        c=config, dtype=q.dtype, q_tile=config.block_q, kv_tile=config.block_kv, segmented=False,
        sinks=call.sinks_N is not None, interpretable=interpretable, size=size,
    )  # fmt: skip
    return kernel.attend_all(operands, num_queries=q.shape[1])[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _SeenTiles(TileRange):
    """Tiles of a block, and the keys begin..end that any of its queries sees."""

    begin: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk(ForwardKernel):
    """Kernel of one call with a chunk of new tokens per row."""

    name: ClassVar[str] = "paged_attention_chunk"

    size: int  # slots of a page

    @staticmethod
    def rows(lengths_B: jax.Array, queries_B: jax.Array) -> jax.Array:
        """Returns the position of each row's first query, and its number of queries."""
        return jnp.stack([lengths_B - queries_B, queries_B], axis=1)

    @property
    def split(self) -> PagePieces:
        """The pieces of pages that a key tile consists of."""
        return PagePieces(size=self.size, block=self.c.block_kv)

    @property
    def pieces(self) -> int:
        """Number of TMA copies that bring one tile of keys, or one of values."""
        return self.split.count

    def place(self, gmem, block) -> tuple[jax.Array, jax.Array, jax.Array, TileRange]:
        """Returns a tile's batch entry, head, first query, and the key tiles that it visits."""
        c, left = self.c, self.spec.left
        head, q_tile = self.tile_of(block)
        b, n, q0 = lax.div(head, self.g.N), lax.rem(head, self.g.N), q_tile * c.block_q
        offset, queries = gmem.rows[b, 0], gmem.rows[b, 1]
        # Without queries, it sees nothing.
        after = jnp.maximum(offset + jnp.minimum(q0 + c.block_q, queries), 0)
        end = jnp.where(q0 < queries, after, 0)
        begin, full_lo = jnp.int32(0), jnp.int32(0)
        if left is not None:
            begin = jnp.minimum(jnp.maximum(offset + q0 - left, 0), end)
            full_lo = _tiles(jnp.maximum(end - 1 - left, 0) + (c.block_kv - 1), c.block_kv)
        hi = _tiles(end + (c.block_kv - 1), c.block_kv)
        # The last tile's values are cleaned where the second tile's scores are masked.
        full_hi = jnp.minimum(_tiles(jnp.maximum(offset + q0 + 1, 0), c.block_kv), hi - 2)
        tiles = TileRange(_tiles(begin, c.block_kv), full_lo, full_hi, hi)
        tiles = tiles.ordered(at_least_one=True)
        return b, n, q0, _SeenTiles(tiles.lo, tiles.full_lo, tiles.full_hi, tiles.hi, begin, end)

    def aligned(self, gmem, b, row0):
        """Returns the position in the row of query ``row0``."""
        return gmem.rows[b, 0] + row0

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        slot = lax.rem(i, self.c.num_stages)
        page_slots = self.split.page_slots(gmem, b, tile)
        self.split.copy(gmem.k, smem.k.at[slot], smem.k_full.at[slot], page_slots, kv_head)

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of the values of a tile, which arrive at ``v_full``."""
        slot = lax.rem(i, self.c.num_stages)
        page_slots = self.split.page_slots(gmem, b, tile)
        self.split.copy(gmem.v, smem.v.at[slot], smem.v_full.at[slot], page_slots, kv_head)

    def prefetch(self, gmem, block: jax.Array) -> None:
        """Prefetches nothing: the tables that name a later block's pages would be waited for."""

    def cleaner(self, smem, slot, keys: TileRange, i, *, masked: bool) -> Callable[[], None] | None:
        """Zeroes values of a tile that no query of the block sees, which may be anything."""
        assert isinstance(keys, _SeenTiles)
        if not masked:
            return None
        key0 = (keys.hi - 1 - i) * self.c.block_kv
        first, stop = keys.begin - key0, keys.end - key0

        def cleaned() -> None:
            is_ragged = (first > 0) | (stop < self.c.block_kv)
            pl.when(is_ragged)(lambda: clean(smem.v.at[slot], first, stop))

        return cleaned

    def normalized(self, gmem, b, n, row0, peak, total):
        """Factors as without pages; 0 for rows that are no queries."""
        factor, peak, total = ForwardKernel.normalized(self, gmem, b, n, row0, peak, total)
        row = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=row_layout())
        return jnp.where(row0 + row < gmem.rows[b, 1], factor, 0.0), peak, total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Token(_Chunk):
    """Kernel of one call with one new token per row, whose query heads are the tile's rows."""

    name: ClassVar[str] = "paged_attention_token"

    @staticmethod
    def rows(lengths_B: jax.Array, queries_B: jax.Array) -> jax.Array:
        """Returns each row's last position, and its number of query heads per kv head."""
        return jnp.stack([lengths_B - 1, jnp.where(lengths_B > 0, queries_B, 0)], axis=1)

    def place(self, gmem, block) -> tuple[jax.Array, jax.Array, jax.Array, TileRange]:
        """Returns a tile's batch entry, head, first query, and the key tiles that it visits."""
        c, left = self.c, self.spec.left
        head, q_tile = self.tile_of(block)
        b, n, q0 = lax.div(head, self.g.N), lax.rem(head, self.g.N), q_tile * c.block_q
        end = gmem.rows[b, 0] + 1
        begin = jnp.int32(0)
        if left is not None:
            begin = jnp.minimum(jnp.maximum(end - 1 - left, 0), end)
        hi = _tiles(end + (c.block_kv - 1), c.block_kv)
        full_lo = _tiles(begin + (c.block_kv - 1), c.block_kv)
        # The last tile's values are cleaned where the second tile's scores are masked.
        tiles = TileRange(_tiles(begin, c.block_kv), full_lo, hi - 2, hi)
        tiles = tiles.ordered(at_least_one=True)
        return b, n, q0, _SeenTiles(tiles.lo, tiles.full_lo, tiles.full_hi, tiles.hi, begin, end)

    def aligned(self, gmem, b, row0):
        """Returns the row's last position, whichever its query heads."""
        del row0
        return gmem.rows[b, 0]

    def mask(self, smem, slot, s, aligned, key0, q_ids):
        """Sets scores to -inf of keys that the token does not see."""
        del smem, slot, q_ids
        column = plgpu.broadcasted_iota(jnp.int32, (64, STRIP), 1, layout=tile_layout())
        ahead, masked = aligned - key0 - column, []
        for i, strip in enumerate(strips(s)):
            seen = ahead >= i * STRIP
            if self.spec.left is not None:
                seen = seen & (ahead <= i * STRIP + self.spec.left)
            masked.append(jnp.where(seen, strip, -jnp.inf))
        return jnp.concatenate(masked, axis=1)


def _tiles(keys: jax.Array, block: int) -> jax.Array:
    return lax.div(keys, jnp.int32(block))
