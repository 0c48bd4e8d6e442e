"""Base class of the kernels that read pages: roles of warpgroups, segments, copies of pages.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.paged_attention.spec import PagedCall, PagedSpec

from .config import ROWS, PagedConfig, QueryLayout
from .plan import Extent, PagePlan, extent_of, piece_start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagePieces:
    """Division of a tile of ``block`` keys into pieces of pages of ``size`` slots."""

    size: int
    block: int

    @property
    def count(self) -> int:
        """Number of pieces (parts of pages) that a key tile consists of."""
        return max(1, self.block // self.size)

    @property
    def slots(self) -> int:
        """Number of slots of a page in one piece."""
        return min(self.size, self.block)

    def page_slots(self, gmem, row, tile) -> list[tuple[Any, Any]]:
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

    def copy(self, pages_gmem, tile_smem, full, page_slots: list[tuple[Any, Any]], head) -> None:
        """Starts the TMA copies of a tile's pieces from pages to shared memory."""
        for j, (page, slot) in enumerate(page_slots):
            plgpu.copy_gmem_to_smem(
                pages_gmem.at[page, pl.ds(slot, self.slots), head],
                tile_smem.at[pl.ds(j * self.slots, self.slots)],
                full,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive key tiles that a worker reads for one query tile; fields are kernel scalars."""

    partial: Any  # index of its partial result
    row: Any  # row of the batch
    tile: Any  # index among the row's query tiles
    head: Any  # kv head
    extent: Extent
    first: Any  # first key tile, counted in the row
    count: Any  # number of key tiles
    whole: Any  # whether the query tile sees no other key tiles


class Partials(NamedTuple):
    """Results of the page-reading kernels: partial results by segment, and final ones of rows."""

    out: jax.Array  # float32 [partials, rows, V]
    lse: jax.Array  # float32 [partials, 64], in units of log2
    whole: jax.Array | None = None
    """[B, T, N, V] in the queries' dtype: final results of rows that one worker read alone, which
    have no partial results; other rows are not written."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageKernel(abc.ABC):
    """Base class of the kernels that read pages; subclasses define the computation.

    Methods emit the kernel's phases. A worker has a warpgroup that fills a ring and one
    that computes; slot s of worker w is ``w * num_stages + s``.
    """

    g: QueryLayout
    c: PagedConfig
    spec: PagedSpec
    dtype: jnp.dtype
    capacity: int
    ragged_queries: bool

    @abc.abstractmethod
    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and ``barriers``, by name."""

    @abc.abstractmethod
    def compute(self, gmem, smem, worker) -> None:
        """Computes the attention of a worker's segments."""

    def copy_keys(self, gmem, smem, slot, page_slots: list[tuple[Any, Any]], head) -> None:
        """Starts the copies of a tile's keys, and of their scales if pages are quantized."""
        self.pieces.copy(gmem.k, smem.k.at[slot], smem.k_full.at[slot], page_slots, head)

    def barriers(self, *, key_copies: int = 1) -> dict[str, Any]:
        """Returns a block's barriers; a tile's keys come in ``key_copies`` copies of each piece."""
        slots, pieces = self.c.num_workers * self.c.num_stages, self.pieces.count
        ring = functools.partial(plgpu.Barrier, num_barriers=slots)
        each = functools.partial(plgpu.Barrier, num_barriers=self.c.num_workers)
        return {
            "q_full": each(num_arrivals=self.g.tokens),
            "q_empty": each(num_arrivals=1),
            "k_full": ring(num_arrivals=key_copies * pieces),
            "k_empty": ring(num_arrivals=1),
            "v_full": ring(num_arrivals=pieces),
            "v_empty": ring(num_arrivals=1),
        }

    def partials(
        self, call: PagedCall, plan: PagePlan, *, rows: int, whole: bool = False, **scales: Any
    ) -> Partials:
        """Launches the kernel.

        Args:
            rows: number of rows in a segment's result.
            whole: whether to write final results of rows that one worker reads alone.
            scales: scales of quantized pages, by operand name.
        """
        g, c = self.g, self.c
        # One more: the second kernel reads a few rows at a time, perhaps beyond a partial's last.
        count = c.num_teams(g) * c.team(g) + g.num_entries * g.K + 1
        operands = {"q": call.q_BTNH, "k": call.k_PSKH, "v": call.v_PSKV, **scales}
        operands |= {"tables": call.tables_BM, "lengths": call.lengths_B}
        operands |= {} if call.query_lengths_B is None else {"queries": call.query_lengths_B}
        operands |= {"before": plan.before_E1, "starts": plan.entry_W}
        results = {
            "out": jax.ShapeDtypeStruct((count, rows, g.V), jnp.float32),
            "lse": jax.ShapeDtypeStruct((count, ROWS), jnp.float32),
        }
        if whole:
            results["whole"] = jax.ShapeDtypeStruct((g.B, g.T, g.N, g.V), self.dtype)
        found = launch(
            self.run,
            name="paged_attention",
            operands=operands,
            results=results,
            scratch=self.scratch(),
            grid=(c.num_blocks,),
            grid_names=("block",),
            num_threads=2 * c.num_workers,
        )
        return Partials(**found)

    def run(self, gmem, smem) -> None:
        """Runs one block: a role for each warpgroup."""
        workers, wg = self.c.num_workers, lax.axis_index("wg")
        # What all warpgroups hold together must not exceed an SM's registers: asking for
        # more does not fail, it waits for ever.
        most, least = (216, 40) if workers == 2 else (240, 24)

        @pl.when(wg < workers)
        def _():
            plgpu.set_max_registers(most, action="increase")
            self.each_barrier(smem, wg, plgpu.barrier_arrive)
            self.compute(gmem, smem, wg)

        @pl.when(wg >= workers)
        def _():
            plgpu.set_max_registers(least, action="decrease")
            self.load(gmem, smem, wg - workers)

    def load(self, gmem, smem, worker) -> None:
        """Fills a worker's ring with the tiles of its segments."""
        c = self.c

        def segment(seg: Segment, done):
            plgpu.barrier_wait(smem.q_empty.at[worker])
            self.copy_queries(gmem, smem.q.at[worker], smem.q_full.at[worker], seg)

            def step(i, _):
                slot = worker * c.num_stages + lax.rem(done + i, c.num_stages)
                page_slots = self.pieces.page_slots(gmem, seg.row, seg.first + i)
                plgpu.barrier_wait(smem.k_empty.at[slot])
                self.copy_keys(gmem, smem, slot, page_slots, seg.head)
                plgpu.barrier_wait(smem.v_empty.at[slot])
                self.pieces.copy(
                    gmem.v, smem.v.at[slot], smem.v_full.at[slot], page_slots, seg.head
                )

            lax.fori_loop(0, seg.count, step, None)

        self.each_segment(gmem, worker, segment)
        self.each_barrier(smem, worker, plgpu.barrier_wait)

    def each_barrier(self, smem, worker, action: Callable[[Any], None]) -> None:
        """Applies ``action`` to the barriers that signal empty buffers of a worker."""
        action(smem.q_empty.at[worker])
        for i in range(self.c.num_stages):
            slot = worker * self.c.num_stages + i
            action(smem.k_empty.at[slot])
            action(smem.v_empty.at[slot])

    @property
    def pieces(self) -> PagePieces:
        """The pieces of pages that a key tile consists of."""
        return PagePieces(size=self.g.size, block=self.c.block_kv)

    def each_segment(self, gmem, worker, body: Callable[[Segment, Any], None]) -> None:
        """Calls ``body(segment, tiles before it)`` for each segment of a worker's piece."""
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
            extent = extent_of(self.capacity, g, self.spec.window, gmem.lengths[row], queries, tile)
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
