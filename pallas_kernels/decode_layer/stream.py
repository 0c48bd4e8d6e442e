"""One ring of weight tiles through all products of a launch, and the products themselves.

A warpgroup copies tiles of one product after another and waits for free slots only: as weights
depend on nothing, it is in the next product while others still wait at the grid's barrier. Two
warpgroups multiply. A warp has 16 rows of every tile, a lane 8 columns; of each column of tiles the
block's part is added up in one order and written in fp32.

Dims: K contracted, N column of the weight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.held import Held
from pallas_kernels.hopper.machine import LANES
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.ring import offer
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    from_lane_xor,
    fused,
    global_place,
    loaded,
    number,
    total,
    widened_pair,
)

from .attention import Attention, AttentionPlan
from .config import DEPTH, GROUPS, SLICES, THREADS, WIDTH, Share
from .parts import first_block
from .per_thread import below, splat, warp_and_lane

_COLUMNS = 8  # of a lane: 16 bytes
_ACROSS = WIDTH // _COLUMNS  # lanes side by side
_ROWS = DEPTH // SLICES // (LANES // _ACROSS)  # of a lane, one after another
_HELD = Held(count=_COLUMNS, dtype=jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One of a launch's products."""

    weight: str  # names in global memory, of the weight [K, N]
    parts: str  # and of what blocks leave, fp32 [parts, N]
    share: Share
    is_whole: bool  # all of x is in shared memory; else what the block's tiles are multiplied with


def piece(share: Share) -> tuple[jax.Array, jax.Array]:
    """The block's tiles of a product: the first one, and the one after the last."""
    block = lax.axis_index("block")
    starts = (lax.div(b * share.line, jnp.int32(share.blocks)) for b in (block, block + 1))
    return next(starts), next(starts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightStream:
    """The ring of a launch."""

    products: tuple[Product, ...]
    num_stages: int
    dtype: jnp.dtype
    attention: Attention | None = None  # whose keys and values come after the first product

    @property
    def copies(self) -> int:
        """Pieces of a tile, which are copied one by one."""
        return 1 if self.attention is None else self.attention.copies

    def scratch(self) -> dict[str, Any]:
        """The ring, sums, barriers."""
        n = self.num_stages
        return {
            "w": plgpu.SMEM((n, DEPTH, WIDTH), self.dtype),
            "sums": plgpu.SMEM((2, SLICES, WIDTH), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=self.copies, num_barriers=n),
            "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=n),
        }

    def before(self, which: int, plan: AttentionPlan | None) -> jax.Array:
        """Tiles of the block that pass the ring before those of a product."""
        counts = [stop - start for start, stop in (piece(p.share) for p in self.products[:which])]
        if which and plan is not None:
            counts.append(2 * (plan.stop - plan.start))
        return functools.reduce(jnp.add, counts, jnp.int32(0))

    def slot(self, turn: jax.Array) -> jax.Array:
        """Where a tile lies in the ring."""
        return lax.rem(turn, jnp.int32(self.num_stages))

    def load(self, gmem, smem, plan: AttentionPlan | None) -> None:
        """Fills the ring with all that the block needs."""

        def take(turn):
            slot = self.slot(turn)
            plgpu.barrier_wait(smem.empty.at[slot])
            return slot

        for which, product in enumerate(self.products):
            if which == 1 and self.attention is not None and plan is not None:
                start, stop = piece(self.products[0].share)
                self.attention.load(
                    gmem, smem, plan, lambda turn, done=stop - start: take(done + turn)
                )
            down, before = product.share.down, self.before(which, plan)
            start, stop = piece(product.share)
            w_KN = getattr(gmem, product.weight)

            def step(i, _, down=down, before=before, start=start, w_KN=w_KN):
                slot, row = take(before + i - start), lax.rem(i, jnp.int32(down)) * DEPTH
                columns = pl.ds(lax.div(i, jnp.int32(down)) * WIDTH, WIDTH)
                rows = DEPTH // self.copies
                for first in range(0, DEPTH, rows):
                    plgpu.copy_gmem_to_smem(
                        w_KN.at[pl.ds(row + first, rows), columns],
                        smem.w.at[slot, pl.ds(first, rows)],
                        smem.full.at[slot],
                    )

            lax.fori_loop(start, stop, step, None)

    def offer(self, smem) -> None:
        """What a warpgroup that multiplies does first."""
        offer(smem.empty, self.num_stages)

    def attend(self, gmem, smem, plan: AttentionPlan) -> None:
        """The block's part of attention."""
        assert self.attention is not None
        start, stop = piece(self.products[0].share)
        self.attention.attend(gmem, smem, plan, lambda turn: self.slot(stop - start + turn))

    def multiply(self, gmem, smem, which: int, plan: AttentionPlan | None = None) -> None:
        """Products of the numbers in ``smem.x`` with the block's tiles, to its parts."""
        product = self.products[which]
        down, before = product.share.down, self.before(which, plan)
        start, stop = piece(product.share)

        def column(t, _):
            top = t * down
            base = top if product.is_whole else start

            def step(i, sums):
                slot = self.slot(before + i - start)
                plgpu.barrier_wait(smem.full.at[slot])
                sums = self.add_tile(sums, smem.w.at[slot], smem.x, (i - base) * DEPTH)
                plgpu.barrier_arrive(smem.empty.at[slot])
                return sums

            first, last = jnp.maximum(start, top), jnp.minimum(stop, top + down)
            sums = lax.fori_loop(first, last, step, _nothing())
            self.leave(sums, smem.sums, getattr(gmem, product.parts), t, product.share)

        last = lax.div(stop - 1, jnp.int32(down)) + 1
        lax.fori_loop(lax.div(start, jnp.int32(down)), last, column, None)

    def add_tile(self, sums: jax.Array, w_smem: Any, x_smem: Any, row: jax.Array) -> jax.Array:
        """Sums with the products of a tile and x from ``row`` on."""
        kinds = (_HELD.layout, plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=kinds, return_type=_HELD.array)
        def add(ctx, sums, w, x, row):
            del ctx
            return _HELD.together(self.tile(_HELD.apart(sums), w, x, row.registers.flat[0]))

        return add(sums, w_smem, x_smem, splat(row))

    def tile(self, sums: list[Any], w, x, row) -> list[Any]:
        """``add_tile`` as one thread does it."""
        warp, lane = warp_and_lane()
        mine = total((warp, DEPTH // SLICES), (arith.divui(lane, constant(_ACROSS)), _ROWS))
        x_place = total(address(x), (total(mine, row), 4))
        factors = [
            arith.bitcast(ir.F32Type.get(), word)
            for word in loaded("ld.shared.v4.b32", x_place, _ROWS, kind="r")
        ]
        across = arith.remui(lane, constant(_ACROSS))
        w_place = total(address(w), (mine, 2 * WIDTH), (across, 2 * _COLUMNS))
        for i, factor in enumerate(factors):
            words = loaded("ld.shared.v4.b32", w_place, 4, kind="r", offset=2 * WIDTH * i)
            weights = [x for word in words for x in widened_pair(word, self.dtype)]
            sums = [fused(w, factor, x) for w, x in zip(weights, sums, strict=True)]
        return sums

    def leave(self, sums: jax.Array, sums_smem: Any, parts: Any, column, share: Share) -> None:
        """The block's part of a column of tiles, over all warps."""
        kinds = (_HELD.layout, plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=(*kinds, plgpu.Layout.WG_SPLAT(())))
        def put(ctx, sums, sums_smem, parts, column, block):
            del ctx
            column, block = (x.registers.flat[0] for x in (column, block))
            self.put(_HELD.apart(sums), sums_smem, parts, column, block, share)

        put(sums, sums_smem, parts, splat(column), splat(lax.axis_index("block")))

    def put(self, sums: list[Any], sums_smem, parts, column, block, share: Share) -> None:
        """``leave`` as one thread does it.

        Columns take turns at two buffers: who writes one again has met those who read it, in
        between.
        """
        warp, lane = warp_and_lane()
        for distance in (_ACROSS, 2 * _ACROSS):
            sums = [arith.addf(x, from_lane_xor(x, distance)) for x in sums]
        turn = total(address(sums_smem), (arith.remui(column, constant(2)), 4 * SLICES * WIDTH))
        place = total(turn, (warp, 4 * WIDTH), (lane, 4 * _COLUMNS))
        with mgpu_utils.when(below(lane, constant(_ACROSS))):
            for i in range(0, _COLUMNS, 4):
                text = f"st.shared.v4.f32 [$0+{4 * i}], {{$1,$2,$3,$4}};"
                assembly(None, [place, *sums[i : i + 4]], text, "r,f,f,f,f", pure=False)
        meet_in_block(THREADS)
        mine = mgpu_utils.thread_idx()
        with mgpu_utils.when(below(mine, constant(WIDTH))):
            place = total(turn, (mine, 4))
            found = [
                assembly(
                    ir.F32Type.get(), [place], f"ld.shared.f32 $0, [$1+{4 * WIDTH * i}];", "=f,r",
                    pure=False,
                )
                for i in range(SLICES)
            ]  # fmt: skip
            part = arith.subi(block, first_block(column, share))
            at = total((part, share.N), (column, WIDTH), mine)
            out = global_place(parts, at, 4)
            both = [out, functools.reduce(arith.addf, found)]
            assembly(None, both, "st.global.f32 [$0], $1;", "l,f", pure=False)


def _nothing() -> jax.Array:
    @plgpu.inline_mgpu(return_type=_HELD.array)
    def zeros(ctx):
        del ctx
        return _HELD.together([number(0.0)] * _COLUMNS)

    return zeros()
