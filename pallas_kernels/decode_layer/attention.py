"""Attention of one new token to the pages of its row, as a phase of a decoder layer.

The key tiles of all kv heads, head after head, are divided evenly among the blocks. Tiles of cached
keys and values come through the same ring buffer as weights. The block with a head's last tile
rotates the new key (RoPE); it stores the new key and value in that tile in shared memory and in
their page. Each warp has some keys of each tile, and its own running softmax. A block writes its
unnormalized sums with the softmax's maximum and sum. The blocks that read them for the next product
merge them (``put_attended``).

Dims: N query heads, K kv heads, G query heads per kv head, H width, P page, S slot of a page.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.each_thread import each_thread, splat
from pallas_kernels.hopper.mosaic import arith, plgpu
from pallas_kernels.hopper.slots import COPIED, Slots
from pallas_kernels.hopper.thread_registers import ThreadRegisters
from pallas_kernels.hopper.threads import assembly, constant, global_place, i32, total

from .attention_threads import HeadSizes
from .config import WIDTH
from .per_thread import COPIED_ROWS, copied_place, row_place


class KeyPlan(NamedTuple):
    """Division of a step's key tiles among blocks, int32; each role of a block reads it once."""

    length: jax.Array  # number of keys, including the new one
    tiles: jax.Array  # number of key tiles per head
    line: jax.Array  # number of key tiles of all heads
    blocks: jax.Array  # number of blocks that have key tiles
    start: jax.Array  # this block's first tile
    stop: jax.Array  # the tile after this block's last
    place: jax.Array  # the new token's slot in a layer's pool; below 0: none

    def first_block(self, head: jax.Array) -> jax.Array:
        """Returns the index of the block that has a head's first key tile."""
        return lax.div((head * self.tiles + 1) * self.blocks - 1, jnp.maximum(self.line, 1))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attention phase of one ``decode_layers`` call."""

    sizes: HeadSizes
    num_pages: int
    page: int  # slots per page
    table: int  # most pages per row
    blocks: int

    @property
    def held(self) -> ThreadRegisters:
        """Register layout of each thread's accumulated values, softmax maxima and softmax sums."""
        return ThreadRegisters(count=self.sizes.num_registers, dtype=jnp.dtype(jnp.float32))

    def unsupported(self) -> str | None:
        """Returns why this attention cannot be computed; None if it can."""
        s = self.sizes
        if s.H not in (64, 128) or s.N % s.K:
            return f"{s.N} query heads, {s.K} kv heads of {s.H} columns: those are 64 or 128"
        return None

    def plan(self, gmem) -> KeyPlan:
        """Returns this step's division of key tiles among blocks."""
        s, block = self.sizes, lax.axis_index("block")
        length = jnp.clip(gmem.positions[0] + 1, 0, self.table * self.page)
        tiles = lax.div(length + (s.keys - 1), jnp.int32(s.keys))
        line = tiles * s.K
        blocks = jnp.minimum(jnp.int32(self.blocks), line)
        start, stop = (
            lax.div(jnp.minimum(b, blocks) * line, jnp.maximum(blocks, 1))
            for b in (block, block + 1)
        )
        at = jnp.maximum(length - 1, 0)
        page = gmem.tables[0, lax.div(at, self.page)]
        is_kept = (length > 0) & (page >= 0) & (page < self.num_pages)
        place = jnp.where(is_kept, page * self.page + lax.rem(at, self.page), -1)
        return KeyPlan(length, tiles, line, blocks, start, stop, place)

    def load(self, gmem, smem, plan: KeyPlan, layer, before, slots) -> None:
        """Loads the block's key and value tiles into the ring, behind ``before`` other tiles."""

        def body(tables, barriers, ring, k, v, tile_index, head, tile):
            self.fetch(tables, [k, v], barriers, ring, slots, tile_index, head, tile)

        def step(i, _):
            head, tile = lax.div(i, plan.tiles), lax.rem(i, plan.tiles)
            refs = [gmem.tables, smem.barriers, smem.w]
            numbers = [before + 2 * (i - plan.start), head, tile]
            each_thread(body, refs, numbers, layer=layer, stacks=[gmem.k, gmem.v])

        lax.fori_loop(plan.start, plan.stop, step, None)

    def fetch(self, tables, pools, barriers, ring, slots: Slots, tile_index, head, tile) -> None:
        """Starts one thread's part of the copies of a tile of keys and of a tile of values."""
        s, (down, across) = self.sizes, copied_place()
        rows = []
        for first in range(0, s.keys, COPIED_ROWS):
            position = total((tile, s.keys), down, constant(first))
            place = arith.divui(position, constant(self.page))
            # A tile may go beyond what the row has: any page will do.
            place = arith.minui(place, constant(self.table - 1))
            word = global_place(tables, place, 4)
            page = assembly(i32(), [word], "ld.global.nc.b32 $0, [$1];", "=r,l", pure=False)
            page = arith.minui(arith.maxsi(page, constant(0)), constant(self.num_pages - 1))
            slot = arith.remui(position, constant(self.page))
            rows.append(total((total((page, self.page), slot), s.K), head))
        for which, pool in enumerate(pools):
            mine = total(tile_index, constant(which))
            target = total(slots.place(ring, mine), (down, 2 * WIDTH), (across, COPIED))
            copies = []
            for half in range(s.halves):
                for i, row in enumerate(rows):
                    column = total((across, COPIED // 2), constant(half * WIDTH))
                    to = constant(2 * WIDTH * (half * s.keys + i * COPIED_ROWS))
                    copies.append((row_place(pool, row, column, s.H), total(target, to)))
            slots.wait_free(barriers, mine)
            slots.fill(barriers, mine, copies)

    def attend(self, gmem, smem, plan: KeyPlan, layer, before, slots) -> None:
        """Computes attention to the block's key tiles, and writes its partial results."""

        def head(h, _):
            end = (h + 1) * plan.tiles
            first, last = jnp.maximum(plan.start, end - plan.tiles), jnp.minimum(plan.stop, end)
            self.prepare(gmem, smem, layer, h, plan, is_last=last == end)

            def step(i, held):
                tile_index = before + 2 * (i - plan.start)
                left = plan.length - (i - (end - plan.tiles)) * self.sizes.keys

                def put_token(x, ring, barriers, tile_index, row):
                    k, v = self.wait(ring, barriers, slots, tile_index)
                    self.sizes.put_token(x, k, v, row)

                @pl.when(i == end - 1)
                def _():
                    each_thread(put_token, [smem.x, smem.w, smem.barriers], [tile_index, left - 1])

                return self.add_tile(held, smem, slots, tile_index, left)

            held = lax.fori_loop(first, last, step, self.held.initial(self.sizes.nothing))
            part = lax.axis_index("block") - plan.first_block(h)
            self.write_partial(held, smem.x, gmem.attended, gmem.stats, h, part)

        @pl.when(plan.stop > plan.start)
        def _():
            stop = lax.div(plan.stop - 1, plan.tiles) + 1
            lax.fori_loop(lax.div(plan.start, plan.tiles), stop, head, None)

    def prepare(self, gmem, smem, layer, h, plan: KeyPlan, *, is_last) -> None:
        """Stores a head's rotated queries, and the new key and value, in shared memory."""

        def body(heads, cos, sin, x, k, v, h, place):
            self.sizes.put_heads(heads, cos, sin, x, [k, v], h, place)

        refs = [gmem.qkv_parts, gmem.cos, gmem.sin, smem.x]
        numbers = [h, jnp.where(is_last, plan.place, -1)]
        each_thread(body, refs, numbers, layer=layer, stacks=[gmem.k, gmem.v])

    def wait(self, ring, barriers, slots: Slots, tile_index) -> list[Any]:
        """Waits for a tile of keys and one of values; returns their addresses."""
        both = [tile_index, total(tile_index, constant(1))]
        for each in both:
            slots.wait_full(barriers, each)
        return [slots.place(ring, each) for each in both]

    def add_tile(self, held, smem, slots: Slots, tile_index, left) -> jax.Array:
        """Adds attention to one tile of keys and values to the sums ``held``.

        ``tile_index`` is the key tile's number in the ring; ``left`` counts the row's keys from
        there on.
        """
        kinds = (self.held.layout, *[plgpu.RefType()] * 3, *[plgpu.Layout.WG_SPLAT(())] * 2)

        @plgpu.inline_mgpu(arg_types=kinds, return_type=self.held.array)
        def add(ctx, held, x, ring, barriers, tile_index, left):
            del ctx
            tile_index, left = (each.registers.flat[0] for each in (tile_index, left))
            k, v = self.wait(ring, barriers, slots, tile_index)
            held = self.sizes.tile(self.held.registers(held), x, k, v, left)
            for each in (tile_index, total(tile_index, constant(1))):
                slots.release(barriers, each)
            return self.held.wrap(held)

        return add(held, smem.x, smem.w, smem.barriers, splat(tile_index), splat(left))

    def write_partial(self, held, x_smem, attended, stats, h, part) -> None:
        """Writes the attention sums of all warps as the block's partial result."""
        kinds = (self.held.layout, *[plgpu.RefType()] * 3, *[plgpu.Layout.WG_SPLAT(())] * 2)

        @plgpu.inline_mgpu(arg_types=kinds)
        def put(ctx, held, x, attended, stats, h, part):
            del ctx
            h, part = (each.registers.flat[0] for each in (h, part))
            self.sizes.write_partial(self.held.registers(held), x, attended, stats, h, part)

        put(held, x_smem, attended, stats, splat(h), splat(part))
