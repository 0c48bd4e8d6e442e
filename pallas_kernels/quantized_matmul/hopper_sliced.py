"""The kernel for a few rows, K split over warps: no block waits for another.

A block has some columns, so few that blocks are as many as multiprocessors, and all of K. Of each
stage a warp multiplies its own 128 rows with all columns of the stage. What the warps found is
added in shared memory, in one order, when all are done.

Dims: M row of x, K contracted, N column of the weight, G group of rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.cluster_sums import STRIP
from pallas_kernels.hopper.held import Held
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPGROUP, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu, mgpu_utils, plgpu
from pallas_kernels.hopper.resident_rows import DEPTH, ResidentRows
from pallas_kernels.hopper.ring import offer
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    fused,
    global_number,
    store_number,
    thread,
    total,
)

from .codes import COLUMNS, ROWS
from .config import ProductShape
from .fragments import Dequantizer, load_matrices, load_number, load_words
from .hopper_kernel import SWIZZLED
from .sliced_config import SlicedConfig
from .weight import QuantizedWeight

BLOCKS = DEPTH // ROWS  # of 32 rows, that a warp has of a stage


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlicedKernel:
    """The kernel of one call; methods are its phases, written once per trace."""

    c: SlicedConfig
    s: ProductShape
    dequantizer: Dequantizer
    scale_dtype: jnp.dtype
    out_dtype: jnp.dtype
    norm: RmsNorm | None = None  # of x
    gated: bool = False
    has_residual: bool = False

    @property
    def rows(self) -> ResidentRows:
        """x: warpgroups take turns at 128 columns, of a stage as many as they have warps."""
        return ResidentRows(
            M=self.s.M,
            K=self.s.K,
            dtype=self.dequantizer.dtype,
            steps=self.s.K // DEPTH,
            groups=self.c.groups,
            places=self.s.places,
            norm=self.norm,
            gated=self.gated,
        )

    @property
    def held(self) -> Held:
        """A thread's sums: four of each fragment."""
        return Held(count=4 * self.c.fragments, dtype=jnp.dtype(jnp.float32))

    @property
    def pass_columns(self) -> int:
        """Columns of a stage."""
        return COLUMNS * self.c.fragments

    def result(
        self, x_MK: jax.Array, weight: QuantizedWeight, residual_MN: jax.Array | None
    ) -> jax.Array:
        """[M, N]."""
        c, s = self.c, self.s
        across = s.N // COLUMNS
        operands = {
            "x": x_MK,
            "words": weight.data,
            "scales": weight.scales.reshape(-1, across, COLUMNS),
            **self.rows.operands(),
        }
        if weight.zeros is not None:
            operands["zeros"] = weight.zeros.reshape(-1, across, COLUMNS)
        if residual_MN is not None:
            operands["residual"] = residual_MN
        return launch(
            self.run,
            name="quantized_matmul",
            operands=operands,
            results={"out": jax.ShapeDtypeStruct((s.M, s.N), self.out_dtype)},
            scratch=self.scratch(),
            num_threads=c.groups + 1,
            grid=(s.N // c.block_columns,),
            grid_names=("columns",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """The ring, x, every warp's sums, barriers."""
        c, s = self.c, self.s
        stage = (c.units * BLOCKS, c.fragments, 32 * self.s.words_per_lane)
        x = (c.groups, c.steps(s), WARPS, DEPTH // SWIZZLED, s.places, SWIZZLED)
        scratch: dict[str, Any] = {
            "words": plgpu.SMEM((c.stages, *stage), jnp.int32),
            "x": plgpu.SMEM(x, self.dequantizer.dtype),
            "sums": plgpu.SMEM((c.passes, c.units * self.pass_columns * s.M), jnp.float32),
            **self.rows.scratch(),
        }
        for name in self.s.scale_arrays:
            part = (c.stages, c.units * s.scaled_parts, c.fragments, COLUMNS)
            dtype = self.scale_dtype if name == "scales" else jnp.dtype(jnp.uint16)
            scratch[name] = plgpu.SMEM(part, dtype)
        copies = 1 + len(self.s.scale_arrays)
        scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages)
        scratch["empty"] = plgpu.Barrier(num_arrivals=c.groups, num_barriers=c.stages)
        scratch["summed"] = plgpu.Barrier(num_arrivals=c.groups)
        return scratch

    def run(self, gmem, smem) -> None:
        """One block: a role for each warpgroup."""
        c, wg = self.c, lax.axis_index("wg")
        pl.when(wg < c.groups)(functools.partial(self.compute, gmem, smem, wg))
        pl.when(wg == c.groups)(functools.partial(self.load, gmem, smem))

    def load(self, gmem, smem) -> None:
        """Fills the ring."""
        c, s, steps = self.c, self.s, self.c.steps(self.s)
        first = lax.axis_index("columns") * c.passes

        def step(i, _):
            slot = lax.rem(i, c.stages)
            plgpu.barrier_wait(smem.empty.at[slot])
            full, at = smem.full.at[slot], lax.rem(i, steps)
            across = pl.ds((first + lax.div(i, steps)) * c.fragments, c.fragments)
            depth = pl.ds(at * (c.units * BLOCKS), c.units * BLOCKS)
            plgpu.copy_gmem_to_smem(gmem.words.at[depth, across], smem.words.at[slot], full)
            for name in self.s.scale_arrays:
                parts = pl.ds(at * (c.units * s.scaled_parts), c.units * s.scaled_parts)
                ref = getattr(gmem, name).at[parts, across]
                plgpu.copy_gmem_to_smem(ref, getattr(smem, name).at[slot], full)

        lax.fori_loop(0, c.passes * steps, step, None)

    def compute(self, gmem, smem, group: jax.Array) -> None:
        """x into shared memory, a slice of every stage, a part of everyone's sums."""
        c, steps = self.c, self.c.steps(self.s)
        offer(smem.empty, c.stages)
        self.rows.place(gmem, smem, smem.x.at[group], jnp.int32(0), group)

        def one_pass(number, _):
            def step(at, sums):
                slot = lax.rem(number * steps + at, c.stages)
                plgpu.barrier_wait(smem.full.at[slot])
                refs = [smem.words.at[slot], smem.x.at[group, at]]
                refs += [getattr(smem, name).at[slot] for name in self.s.scale_arrays]
                sums = self.add_stage(sums, group, refs)
                plgpu.barrier_arrive(smem.empty.at[slot])
                return sums

            sums = lax.fori_loop(0, steps, step, self.nothing())
            self.keep_sums(sums, group, smem.sums.at[number])

        lax.fori_loop(0, c.passes, one_pass, None)
        plgpu.barrier_arrive(smem.summed)
        plgpu.barrier_wait(smem.summed)
        self.finish(gmem, smem, group)

    def nothing(self) -> jax.Array:
        """Sums of nothing."""

        @plgpu.inline_mgpu(return_type=self.held.array)
        def zeros(ctx):
            del ctx
            return self.held.together([mgpu.c(0.0, ir.F32Type.get())] * self.held.count)

        return zeros()

    def add_stage(self, sums: jax.Array, group: jax.Array, refs: list[Any]) -> jax.Array:
        """Sums with the products of this warp's rows of a stage."""
        held, number = self.held, plgpu.Layout.WG_SPLAT(())
        kinds = [plgpu.RefType()] * len(refs)

        @plgpu.inline_mgpu(arg_types=(held.layout, number, *kinds), return_type=held.array)
        def add(ctx, sums, group, *refs):
            del ctx
            return held.together(self.stage(held.apart(sums), group.registers.flat[0], *refs))

        return add(sums, jnp.broadcast_to(group, ()), *refs)

    def stage(self, totals: list[Any], group, words, x, scales=None, zeros=None) -> list[Any]:
        """One thread's totals with the products of its warp's rows."""
        s, c, per_lane = self.s, self.c, self.s.words_per_lane
        warp, lane = _warp_and_lane()
        row = arith.andi(lane, constant(s.places - 1))
        # Of 8 chunks of 16 bytes in a row of x, the place of one is its number xor the row's.
        chunk = arith.xori(arith.shrui(lane, constant(3)), row)
        half = 2 * SWIZZLED * s.places
        x_place = total(address(x), (warp, 2 * half), (row, 2 * SWIZZLED), (chunk, 16))
        x_places = x_place, arith.xori(x_place, constant(64))
        rows = [load_matrices(x_places[i % 2], half * (i // 2)) for i in range(BLOCKS)]
        unit, column = total(group, (warp, c.groups)), arith.shrui(lane, constant(2))
        word_place = total(
            address(words), (unit, 128 * per_lane * BLOCKS * c.fragments), (lane, 4 * per_lane)
        )

        def place_of(ref: Any, size: int) -> Any:
            across = s.scaled_parts * self.pass_columns
            return (
                None if ref is None else total(address(ref), (unit, size * across), (column, size))
            )

        scale_place = place_of(scales, self.scale_dtype.itemsize)
        zero_place = place_of(zeros, 2)
        found = []
        for fragment in range(c.fragments):
            sums = totals[4 * fragment : 4 * fragment + 4]
            for part in range(max(s.scaled_parts, 1)):
                taken = self.zero_points(zero_place, part, fragment)
                products = self.products(
                    [mgpu.c(0.0, ir.F32Type.get())] * 4 if s.scaled_parts else sums,
                    rows, word_place, part, fragment, taken,
                )  # fmt: skip
                sums = products
                if s.scaled_parts:
                    factors = self.numbers_at(scale_place, part, fragment, self.scale_dtype)
                    sums = [
                        fused(products[i], factors[i >> 1], totals[4 * fragment + i])
                        for i in range(4)
                    ]
                    totals = [*totals[: 4 * fragment], *sums, *totals[4 * fragment + 4 :]]
            found += sums
        return found

    def products(
        self, sums: list[Any], rows: list[Any], place, part: int, fragment: int, taken: Any
    ) -> list[Any]:
        """Sums with a fragment's products, of rows that share a scale; two chains of products, as
        each waits for the one whose sum it adds to.
        """
        blocks, per_lane = BLOCKS // max(self.s.scaled_parts, 1), self.s.words_per_lane
        chains = [sums, [mgpu.c(0.0, ir.F32Type.get())] * 4]
        for block in range(part * blocks, (part + 1) * blocks):
            offset = 128 * per_lane * (block * self.c.fragments + fragment)
            words = load_words(place, offset, per_lane)
            for step in range(2):
                mine = words[step * per_lane // 2 : (step + 1) * per_lane // 2]
                left = self.dequantizer.numbers(mine, taken)
                right = rows[block][2 * step : 2 * step + 2]
                chains[step] = self.dequantizer.product(left, right, chains[step])
        return [arith.addf(a, b) for a, b in zip(*chains, strict=True)]

    def numbers_at(self, place: Any, part: int, fragment: int, dtype: jnp.dtype) -> list[Any]:
        """Scales or zero points of columns g and g + 8."""
        at = COLUMNS * (part * self.c.fragments + fragment)
        return [load_number(place, dtype.itemsize * (at + STRIP * r), dtype) for r in range(2)]

    def zero_points(self, place: Any | None, part: int, fragment: int) -> tuple[Any, Any]:
        """What is taken from the codes of columns g and g + 8."""
        if place is None:
            return (self.dequantizer.zero_pair(None),) * 2
        low, high = self.numbers_at(place, part, fragment, jnp.dtype(jnp.uint16))
        return self.dequantizer.zero_pair(low), self.dequantizer.zero_pair(high)

    def keep_sums(self, sums: jax.Array, group: jax.Array, ref: Any) -> None:
        """A pass's sums into shared memory."""
        number = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(self.held.layout, number, plgpu.RefType()))
        def keep(ctx, sums, group, ref):
            del ctx
            self.keep(self.held.apart(sums), group.registers.flat[0], ref)

        keep(sums, jnp.broadcast_to(group, ()), ref)

    def keep(self, numbers: list[Any], group, ref) -> None:
        """A thread's sums, of rows that x has, to [group and warp, column, row]."""
        warp, lane = _warp_and_lane()
        g, t = arith.shrui(lane, constant(2)), arith.andi(lane, constant(3))
        rows = self.s.M
        mine = total(warp, (group, WARPS))
        base = total(address(ref), (mine, 4 * self.pass_columns * rows), (g, 4 * rows), (t, 8))
        for e in range(2):
            row = total((t, 2), constant(e))
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, constant(rows))):
                for i in range(2 * self.c.fragments):
                    text = f"st.shared.f32 [$0+{4 * (STRIP * i * rows + e)}], $1;"
                    assembly(None, [base, numbers[2 * i + e]], text, "r,f", pure=False)

    def finish(self, gmem, smem, group: jax.Array) -> None:
        """The sums of all warps, in one order, to the result."""
        refs = [smem.sums, gmem.out, gmem.scales]
        refs += [gmem.residual] if self.has_residual else []
        place = (plgpu.Layout.WG_SPLAT(()),) * 2

        @plgpu.inline_mgpu(arg_types=(*place, *[plgpu.RefType()] * len(refs)))
        def add(ctx, column, group, *refs):
            del ctx
            self.write(column.registers.flat[0], group.registers.flat[0], *refs)

        column = lax.axis_index("columns") * self.c.block_columns
        add(*(jnp.broadcast_to(x, ()) for x in (column, group)), *refs)

    def write(self, first, group, sums, out, scales, residual=None) -> None:
        """An element at a time, neighbors of a row by neighboring threads."""
        c, rows, across = self.c, self.s.M, self.pass_columns
        count, threads = c.block_columns * rows, c.groups * WARPGROUP
        for start in range(0, count, threads):
            mine = total(thread(), (group, WARPGROUP), constant(start))
            m, n = (f(mine, constant(c.block_columns)) for f in (arith.divui, arith.remui))
            number, column = (f(n, constant(across)) for f in (arith.divui, arith.remui))
            place = total(
                address(sums), (number, 4 * c.units * across * rows), (column, 4 * rows), (m, 4)
            )
            inside = arith.cmpi(arith.CmpIPredicate.ult, mine, constant(count))
            with mgpu_utils.when(inside):
                parts = [
                    load_number(place, 4 * across * rows * i, jnp.dtype(jnp.float32))
                    for i in range(c.units)
                ]
                found, at = functools.reduce(arith.addf, parts), total(first, n)
                if not self.s.scaled_parts:
                    found = arith.mulf(found, global_number(scales, at, 0, self.scale_dtype))
                at = total((m, self.s.N), at)
                if residual is not None:
                    found = arith.addf(found, global_number(residual, at, 0, self.out_dtype))
                store_number(out, at, found, self.out_dtype)


def _warp_and_lane() -> tuple[Any, Any]:
    """Of this thread, in its warpgroup."""
    return arith.shrui(thread(), constant(5)), arith.andi(thread(), constant(31))
