"""What a worker reads: its segments, their queries, and the pages that a tile is in.

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
from .segments import Segment, TileLine


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagePieces:
    """A tile of ``block`` keys in pages of ``size`` slots, of which one divides the other."""

    size: int
    block: int

    @property
    def count(self) -> int:
        """Of a tile."""
        return max(1, self.block // self.size)

    @property
    def slots(self) -> int:
        """Of a piece."""
        return min(self.size, self.block)

    def places(self, gmem, row, tile) -> list[tuple[Any, Any]]:
        """Page and first slot of each of a tile's pieces."""
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
        """Starts the copies of a tile's pieces."""
        for j, (page, slot) in enumerate(places):
            plgpu.copy_gmem_to_smem(
                pages_gmem.at[page, pl.ds(slot, self.slots), head],
                tile_smem.at[pl.ds(j * self.slots, self.slots)],
                full,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageReader:
    """The call, as those who read pages see it."""

    g: QueryLayout
    c: PagedConfig
    window: int | None
    capacity: int
    ragged_queries: bool

    @property
    def pieces(self) -> PagePieces:
        """Of a tile."""
        return PagePieces(size=self.g.size, block=self.c.block_kv)

    def each_segment(self, gmem, worker, body: Callable[[Segment, Any, Any], None]) -> None:
        """Calls ``body(segment, tiles done, its queries' place)`` for a worker's segments."""
        number = lax.axis_index("block") * self.c.num_workers + worker
        line = TileLine(
            g=self.g, c=self.c, window=self.window, capacity=self.capacity,
            ragged_queries=self.ragged_queries,
        )  # fmt: skip
        queries = self.c.num_queries

        def placed(segment, done, nth) -> None:
            body(segment, done, worker * queries + lax.rem(nth, queries))

        line.walk(gmem, number, placed)

    def copy_queries(self, gmem, tile_smem, full, seg: Segment) -> None:
        """Starts the copies of a segment's queries."""
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
