"""A worker's way along the line of the plan.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .config import PagedConfig, QueryLayout
from .plan import Extent, extent_of, piece_start


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Key tiles side by side that a worker reads for one query tile; numbers in a kernel."""

    partial: Any  # where its result goes
    row: Any  # of the batch
    tile: Any  # of the row's queries
    head: Any  # of keys and values
    extent: Extent
    first: Any  # key tile of the row
    count: Any  # key tiles
    whole: Any  # whether they are all that the query tile sees


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileLine:
    """The line as the kernel of one call walks it."""

    g: QueryLayout
    c: PagedConfig
    window: int | None
    capacity: int
    ragged_queries: bool

    def walk(self, gmem, worker, body) -> None:
        """Calls ``body(segment, tiles done, segments done)`` for a worker's, of all blocks'."""
        g, c = self.g, self.c
        members = c.team(g)
        head_blocks = g.K // members
        team, member = lax.div(worker, members), lax.rem(worker, members)
        total, num_teams = gmem.before[g.num_entries], c.num_teams(g)
        start, stop = (piece_start(team + i, total, num_teams) for i in (0, 1))

        def tiles_of(entry):
            if g.num_entries == 1:  # nothing to look up: a read less in a chain of them
                return jnp.int32(0), lax.div(total, head_blocks)
            before = gmem.before[entry]
            return before, lax.div(gmem.before[entry + 1] - before, head_blocks)

        def step(carry):
            s, at, done, nth = carry
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
            pl.when(count > 0)(lambda: body(segment, done, nth))
            return s + 1, at + count, done + count, nth + (count > 0).astype(jnp.int32)

        entry = jnp.int32(0)
        if g.num_entries > 1:
            entry = jnp.minimum(gmem.starts[team], g.num_entries - 1)
        before, tiles = tiles_of(entry)
        block = lax.div(start - before, jnp.maximum(tiles, 1))
        carry = entry * head_blocks + block, start, jnp.int32(0), jnp.int32(0)
        lax.while_loop(lambda carry: carry[1] < stop, step, carry)
