"""Reading side of the paged kernels: a worker's segments, their queries, and a tile's pages.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu

from .config import PagedConfig, QueryLayout
from .plan import Extent, extent_of, piece_start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagePieces:
    """A tile of ``block`` keys as pieces of pages of ``size`` slots; one size divides the other."""

    size: int
    block: int

    @property
    def count(self) -> int:
        """Number of pieces (parts of pages) that a key tile consists of."""
        return max(1, self.block // self.size)

    @property
    def slots(self) -> int:
        """Number of slots of a page that one piece of a tile covers."""
        return min(self.size, self.block)

    def places(self, gmem, row, tile) -> list[tuple[Any, Any]]:
        """Returns the page and first slot of each piece of a key tile."""
        last, num_pages = gmem.tables.shape[1] - 1, gmem.k.shape[0]

        def page(place):
            # A tile may go beyond what the row has: any page will do, whose values do not count.
            number = gmem.tables[row, jnp.minimum(place, last)]
            return jnp.minimum(jnp.maximum(number, 0), num_pages - 1)

        if self.size >= self.block:
            per_page = self.size // self.block
            return [(page(lax.div(tile, per_page)), lax.rem(tile, per_page) * self.block)]
        return [(page(tile * self.count + j), 0) for j in range(self.count)]

    def copy(self, pages_gmem, tile_smem, full, places: list[tuple[Any, Any]], head) -> None:
        """Starts the TMA copies of a tile's pieces from pages to shared memory."""
        for j, (page, slot) in enumerate(places):
            plgpu.copy_gmem_to_smem(
                pages_gmem.at[page, pl.ds(slot, self.slots), head],
                tile_smem.at[pl.ds(j * self.slots, self.slots)],
                full,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive key tiles that a worker reads for one query tile, as a kernel's scalars."""

    partial: Any  # where its result goes
    row: Any  # of the batch
    tile: Any  # of the row's queries
    head: Any  # of keys and values
    extent: Extent
    first: Any  # key tile of the row
    count: Any  # key tiles
    whole: Any  # whether they are all that the query tile sees


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageReader:
    """Finds a worker's segments and copies their queries, for the kernels that read pages."""

    g: QueryLayout
    c: PagedConfig
    window: int | None
    capacity: int
    ragged_queries: bool

    @property
    def pieces(self) -> PagePieces:
        """The pieces of pages that a key tile consists of."""
        return PagePieces(size=self.g.size, block=self.c.block_kv)

    def each_segment(self, gmem, worker, body: Callable[[Segment, Any], None]) -> None:
        """Calls ``body(segment, tiles done before)`` for each segment of a worker's piece."""
        g, c = self.g, self.c
        members = c.team(g)
        head_blocks = g.K // members
        number = lax.axis_index("block") * c.num_workers + worker
        team, member = lax.div(number, members), lax.rem(number, members)
        total, num_teams = gmem.before[g.num_entries], c.num_teams(g)
        start, stop = (piece_start(team + i, total, num_teams) for i in (0, 1))

        def tiles_of(entry):
            if g.num_entries == 1:  # nothing to look up: a read less in a chain of them
                return jnp.int32(0), lax.div(total, head_blocks)
            before = gmem.before[entry]
            return before, lax.div(gmem.before[entry + 1] - before, head_blocks)

        def step(carry):
            s, at, done = carry
            entry, block = lax.div(s, head_blocks), lax.rem(s, head_blocks)
            if g.num_entries == 1:
                entry = jnp.int32(0)
            before, tiles = tiles_of(entry)
            lo = at - before - block * tiles
            count = jnp.minimum(tiles - lo, stop - at)
            row, tile = lax.div(entry, g.num_q_tiles), lax.rem(entry, g.num_q_tiles)
            queries = gmem.queries[row] if self.ragged_queries else None
            extent = extent_of(self.capacity, g, self.window, gmem.lengths[row], queries, tile)
            segment = Segment(
                partial=(team + s) * members + member,
                row=row,
                tile=tile,
                head=block * members + member,
                extent=extent,
                first=lax.div(extent.begin, c.block_kv) + lo,
                count=count,
                whole=(lo == 0) & (count == tiles),
            )
            pl.when(count > 0)(lambda: body(segment, done))
            return s + 1, at + count, done + count

        entry = jnp.int32(0)
        if g.num_entries > 1:
            entry = jnp.minimum(gmem.starts[team], g.num_entries - 1)
        before, tiles = tiles_of(entry)
        block = lax.div(start - before, jnp.maximum(tiles, 1))
        carry = entry * head_blocks + block, start, jnp.int32(0)
        lax.while_loop(lambda carry: carry[1] < stop, step, carry)

    def copy_queries(self, gmem, tile_smem, full, seg: Segment) -> None:
        """Starts the TMA copies of a segment's queries to shared memory."""
        g = self.g
        head0 = lax.div(seg.head * g.group, 8) * 8
        token0 = lax.div(seg.tile, g.tiles_per_token) * g.tokens
        if g.tiles_per_token > 1:
            head0 += lax.rem(seg.tile, g.tiles_per_token) * g.tile
        rows = min(g.span, g.tile)
        for t in range(g.tokens):
            token = jnp.minimum(token0 + t, g.T - 1)
            plgpu.copy_gmem_to_smem(
                gmem.q.at[seg.row, token, pl.ds(head0, rows)],
                tile_smem.at[pl.ds(t * g.span, rows)],
                full,
            )
