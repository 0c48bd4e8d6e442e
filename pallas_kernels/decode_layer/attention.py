"""Attention of one new token to pages, its key and value among them, as a phase of a layer.

Key tiles of all kv heads are a line, cut into a piece for each block. A block's tiles of keys and
values come through the ring of weights, as earlier steps wrote them. Who has a head's last tile
turns the new key, and puts it and the new value into the tile in shared memory and into their
page. A warp has some keys of each tile, and a softmax of its own; a block leaves what it found
unnormalized, with its maximum and sum, and the next product's readers merge (``merged``).

Dims: N query heads, K kv heads, G query heads per kv head, H width, P page, S slot of a page.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.held import Held
from pallas_kernels.hopper.mosaic import plgpu

from .attention_threads import HeadSizes
from .config import WIDTH
from .per_thread import each_thread, splat


class AttentionPlan(NamedTuple):
    """Numbers that all of a block's roles read once; int32."""

    length: jax.Array  # keys, the new one among them
    tiles: jax.Array  # of a head
    line: jax.Array  # of all heads
    blocks: jax.Array  # that have tiles
    start: jax.Array  # the block's
    stop: jax.Array

    def first_block(self, head: jax.Array) -> jax.Array:
        """Who has a head's first tile."""
        return lax.div((head * self.tiles + 1) * self.blocks - 1, jnp.maximum(self.line, 1))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The phase of one call."""

    sizes: HeadSizes
    num_pages: int
    page: int  # slots
    table: int  # pages of the row at most
    blocks: int

    @property
    def copies(self) -> int:
        """Pieces of a tile, which are copied one by one."""
        return self.sizes.keys // min(self.page, self.sizes.keys) * self.sizes.halves

    @property
    def held(self) -> Held:
        """A thread's sums, maxima and sums of probabilities."""
        return Held(count=self.sizes.num_held, dtype=jnp.dtype(jnp.float32))

    def unsupported(self) -> str | None:
        """Why it cannot be computed; None if it can."""
        s = self.sizes
        if s.H not in (64, 128) or s.N % s.K:
            return f"{s.N} query heads, {s.K} kv heads of {s.H} columns: those are 64 or 128"
        if s.keys % self.page and self.page % s.keys:
            return f"pages of {self.page} slots neither divide {s.keys} nor are multiples of it"
        if self.copies > 4:
            return f"pages of {self.page} slots: a tile would be {self.copies} copies, 4 at most"
        return None

    def plan(self, gmem) -> AttentionPlan:
        """Of this step."""
        s, block = self.sizes, lax.axis_index("block")
        length = jnp.clip(gmem.positions[0] + 1, 0, self.table * self.page)
        tiles = lax.div(length + (s.keys - 1), jnp.int32(s.keys))
        line = tiles * s.K
        blocks = jnp.minimum(jnp.int32(self.blocks), line)
        start, stop = (
            lax.div(jnp.minimum(b, blocks) * line, jnp.maximum(blocks, 1))
            for b in (block, block + 1)
        )
        return AttentionPlan(length, tiles, line, blocks, start, stop)

    def load(self, gmem, smem, plan: AttentionPlan, take: Any) -> None:
        """Keys and values of the block's tiles into the ring; take: waits for its next slot."""
        s = self.sizes
        rows = min(self.page, s.keys)

        def step(i, _):
            head, tile = lax.div(i, plan.tiles), lax.rem(i, plan.tiles)
            for which, pages in enumerate((gmem.k, gmem.v)):
                slot = take(2 * (i - plan.start) + which)
                for first in range(0, s.keys, rows):
                    at = tile * s.keys + first
                    place = jnp.minimum(lax.div(at, self.page), self.table - 1)
                    # A tile may go beyond what the row has: any page will do.
                    page = jnp.clip(gmem.tables[0, place], 0, self.num_pages - 1)
                    slots = pl.ds(lax.rem(at, self.page), rows)
                    for half in range(s.halves):
                        columns = pl.ds(half * WIDTH, WIDTH)
                        plgpu.copy_gmem_to_smem(
                            pages.at[page, slots, head, columns],
                            smem.w.at[slot, pl.ds(half * s.keys + first, rows)],
                            smem.full.at[slot],
                        )

        lax.fori_loop(plan.start, plan.stop, step, None)

    def attend(self, gmem, smem, plan: AttentionPlan, slot_of: Any) -> None:
        """The block's tiles, to its parts."""

        def head(h, _):
            end = (h + 1) * plan.tiles
            first, last = jnp.maximum(plan.start, end - plan.tiles), jnp.minimum(plan.stop, end)
            self.prepare(gmem, smem, h, plan, is_last=last == end)

            def step(i, held):
                slots = [slot_of(2 * (i - plan.start) + which) for which in range(2)]
                for slot in slots:
                    plgpu.barrier_wait(smem.full.at[slot])
                k_smem, v_smem = (smem.w.at[slot] for slot in slots)
                left = plan.length - (i - (end - plan.tiles)) * self.sizes.keys

                @pl.when(i == end - 1)
                def _():
                    each_thread(self.sizes.put_token, [smem.x, k_smem, v_smem], [left - 1])

                held = self.add_tile(held, smem.x, k_smem, v_smem, left)
                for slot in slots:
                    plgpu.barrier_arrive(smem.empty.at[slot])
                return held

            held = lax.fori_loop(first, last, step, self.nothing())
            part = lax.axis_index("block") - plan.first_block(h)
            self.leave(held, smem.x, gmem.attended, gmem.stats, h, part)

        @pl.when(plan.stop > plan.start)
        def _():
            stop = lax.div(plan.stop - 1, plan.tiles) + 1
            lax.fori_loop(lax.div(plan.start, plan.tiles), stop, head, None)

    def prepare(self, gmem, smem, h, plan: AttentionPlan, *, is_last) -> None:
        """A head's queries, and the new key and value, turned, into shared memory."""
        at = jnp.maximum(plan.length - 1, 0)
        page = gmem.tables[0, lax.div(at, self.page)]
        is_kept = is_last & (page >= 0) & (page < self.num_pages)
        place = jnp.maximum(page, 0) * self.page + lax.rem(at, self.page)
        each_thread(
            self.sizes.put_heads,
            [gmem.heads, gmem.cos, gmem.sin, smem.x, gmem.k, gmem.v],
            [h, jnp.where(is_kept, place, -1)],
        )

    def add_tile(self, held, x_smem, k_smem, v_smem, left) -> jax.Array:
        """The sums with a tile; left: keys that the row has from the tile's first one on."""
        kinds = (self.held.layout, *[plgpu.RefType()] * 3, plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=kinds, return_type=self.held.array)
        def add(ctx, held, x, k, v, left):
            del ctx
            held = self.held.apart(held)
            return self.held.together(self.sizes.tile(held, x, k, v, left.registers.flat[0]))

        return add(held, x_smem, k_smem, v_smem, splat(left))

    def leave(self, held, x_smem, attended, stats, h, part) -> None:
        """What all warps found, to the block's part."""
        kinds = (self.held.layout, *[plgpu.RefType()] * 3, *[plgpu.Layout.WG_SPLAT(())] * 2)

        @plgpu.inline_mgpu(arg_types=kinds)
        def put(ctx, held, x, attended, stats, h, part):
            del ctx
            h, part = (each.registers.flat[0] for each in (h, part))
            self.sizes.leave(self.held.apart(held), x, attended, stats, h, part)

        put(held, x_smem, attended, stats, splat(h), splat(part))

    def nothing(self) -> jax.Array:
        """Sums of nothing."""

        @plgpu.inline_mgpu(return_type=self.held.array)
        def start(ctx):
            del ctx
            return self.held.together(self.sizes.nothing())

        return start()
