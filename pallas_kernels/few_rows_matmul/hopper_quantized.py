"""The quantized kernel for Hopper GPUs: 1 to 256 rows times an ``arranged`` 4- or 8-bit weight.

Codes are dequantized in registers and multiplied by ``mma.m16n8k16``. The transposed product is
computed: a warp's left operand is 16 columns of the weight, its right operand 8 rows of x, so one
row of x costs as much as eight. A cluster has some columns and splits K among its blocks; the
warpgroups of a block multiply alternate stages. Their sums are added in a fixed order
(``ClusterSums``). Scales multiply the fp32 sums of a group, not single elements: only the result is
rounded.

With more than eight rows, x is copied in stages with the weight, and adding the sums of a cluster
is slow: 4096 x 14,336 at 16 rows takes 13.2 us unsplit, 22.9 split in two, 45.8 in four.

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
from pallas_kernels.hopper.cluster_sums import STRIP, WIDTH, ClusterSums
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPGROUP
from pallas_kernels.hopper.mosaic import arith, mgpu, plgpu
from pallas_kernels.hopper.resident_rows import DEPTH, ResidentRows
from pallas_kernels.hopper.ring import offer
from pallas_kernels.hopper.threads import address, constant, fused, thread, total
from pallas_kernels.hopper.tile import tiled
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.quantized_weight.fragments import (
    Dequantizer,
    load_matrices,
    load_number,
    load_words,
)
from pallas_kernels.quantized_weight.weight import COLUMNS, ROWS

from .config import ProductShape, QuantizedConfig
from .reference import FewRowsCall

SWIZZLED = 64  # columns of x whose 16-byte chunks are permuted together


def quantized_product(
    call: FewRowsCall, *, out_dtype: jnp.dtype, config: QuantizedConfig
) -> jax.Array:
    """Computes the call, [M, N], by the quantized kernel with tiles that fit.

    It fuses a norm, SwiGLU of the input and a residual; ``choice.fuses`` tells whether it can.
    """
    x_MK, weight = call.x, call.weight
    assert isinstance(weight, QuantizedWeight), "16-bit weights have kernels of their own"
    if weight.order is not None:
        x_MK = jnp.take(x_MK, weight.order, axis=1)
        weight = dataclasses.replace(weight, order=None)
    rows, s = x_MK.shape[0], call.shape
    if not config.is_resident(s):
        s = dataclasses.replace(s, M=s.padded_rows)
        x_MK = jnp.pad(x_MK, ((0, s.M - rows), (0, 0)))
    kernel = QuantizedKernel(
        c=config,
        s=s,
        dequantizer=Dequantizer(code=weight.format.code, dtype=jnp.dtype(x_MK.dtype)),
        scale_dtype=jnp.dtype(weight.scales.dtype),
        out_dtype=jnp.dtype(out_dtype),
        norm=call.norm,
        gated=call.swiglu_input,
        has_residual=call.residual is not None,
    )
    return kernel.result(x_MK, weight, call.residual)[:rows]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedKernel:
    """The quantized kernel of one call; its methods emit the kernel's phases."""

    c: QuantizedConfig
    s: ProductShape
    dequantizer: Dequantizer
    scale_dtype: jnp.dtype
    out_dtype: jnp.dtype
    norm: RmsNorm | None = None  # of x; like ``gated``, only if x is resident
    gated: bool = False
    has_residual: bool = False

    @property
    def is_resident(self) -> bool:
        """Whether x is copied to shared memory at the start, not stage by stage."""
        return self.c.is_resident(self.s)

    @property
    def sums(self) -> ClusterSums:
        """Layout of the sums in registers, and how they are added and written."""
        return ClusterSums(
            rows=self.s.M,
            rows_at_a_time=self.s.rows_at_a_time,
            columns=self.s.N,
            tiles=self.c.tiles,
            split=self.c.split,
            groups=self.c.groups,
            out_dtype=self.out_dtype,
            scale_dtype=None if self.s.scaled_parts else self.scale_dtype,
            has_residual=self.has_residual,
        )

    @property
    def rows(self) -> ResidentRows:
        """The rows of x in shared memory, where x is resident."""
        return ResidentRows(
            M=self.s.M,
            K=self.s.K,
            dtype=self.dequantizer.dtype,
            steps=self.c.steps(self.s),
            groups=self.c.groups,
            places=self.s.places,
            norm=self.norm,
            gated=self.gated,
        )

    @property
    def chains(self) -> int:
        """Number of independent sums per element: 2 if a warp has a single fragment, else 1.

        An MMA waits for the one before it that adds to the same sum.
        """
        return 2 if self.sums.count == 4 else 1

    def result(
        self, x_MK: jax.Array, weight: QuantizedWeight, residual_MN: jax.Array | None
    ) -> jax.Array:
        """Launches the kernel and returns the result, [M, N]."""
        c, s = self.c, self.s
        operands = {
            "x": x_MK,
            "words": weight.data,
            "scales": weight.scales.reshape(-1, s.N // WIDTH, WIDTH),
        }
        if weight.zeros is not None:
            operands["zeros"] = weight.zeros.reshape(-1, s.N // WIDTH, WIDTH)
        if self.is_resident:
            operands |= self.rows.operands()
        if residual_MN is not None:
            operands["residual"] = residual_MN
        return launch(
            self.run,
            name="quantized_matmul",
            operands=operands,
            results={"out": jax.ShapeDtypeStruct((s.M, s.N), self.out_dtype)},
            scratch=self.scratch(),
            num_threads=c.groups + 1,
            # Blocks of the same columns follow one another: the second reads the weight out of L2.
            grid=(s.N // (WIDTH * c.tiles), -(-s.M // s.rows_at_a_time)),
            grid_names=("columns", "rows"),
            cluster=(c.split,),
            cluster_names=("cluster",),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """Returns shared-memory buffers: the ring, x, all warpgroups' sums and barriers."""
        c, s = self.c, self.s
        block = (DEPTH // ROWS, WIDTH * c.tiles // COLUMNS, 32 * self.s.words_per_lane)
        scratch: dict[str, Any] = {
            "words": plgpu.SMEM((c.stages, *block), jnp.int32),
            "sums": plgpu.SMEM((c.groups, self.sums.count * WARPGROUP), jnp.float32),
        }
        copies = 1 + len(self.s.scale_arrays)
        if self.is_resident:
            part = (c.turns(s), s.strips, DEPTH // SWIZZLED, s.places, SWIZZLED)
            scratch["x"] = plgpu.SMEM((c.groups, *part), self.dequantizer.dtype)
            scratch |= self.rows.scratch()
        else:
            part = (c.stages, s.strips * STRIP, DEPTH)
            scratch["x"] = plgpu.SMEM(part, self.dequantizer.dtype, transforms=tiled(128))
            copies += 1
        for name in self.s.scale_arrays:
            part = (c.stages, s.scaled_parts, c.tiles, WIDTH)
            dtype = self.scale_dtype if name == "scales" else jnp.dtype(jnp.uint16)
            scratch[name] = plgpu.SMEM(part, dtype)
        scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages)
        scratch["empty"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.stages)
        return scratch

    def run(self, gmem, smem) -> None:
        """Runs one block: each warpgroup loads or multiplies."""
        c, wg = self.c, lax.axis_index("wg")
        first = lax.axis_index("cluster") * c.steps(self.s)
        pl.when(wg < c.groups)(functools.partial(self.compute, gmem, smem, first, wg))
        pl.when(wg == c.groups)(functools.partial(self.load, gmem, smem, first))

    def load(self, gmem, smem, first) -> None:
        """Loads the block's stages of codes and scales into the ring."""
        c, s = self.c, self.s
        if self.has_many_sums:
            plgpu.set_max_registers(40, action="decrease")
        block = lax.axis_index("columns")
        fragments = WIDTH * c.tiles // COLUMNS
        rows = pl.ds(lax.axis_index("rows") * s.rows_at_a_time, s.strips * STRIP)

        def step(i, _):
            slot = lax.rem(i, c.stages)
            plgpu.barrier_wait(smem.empty.at[slot])
            at, full = first + i, smem.full.at[slot]
            depth = pl.ds(at * (DEPTH // ROWS), DEPTH // ROWS)
            plgpu.copy_gmem_to_smem(
                gmem.words.at[depth, pl.ds(block * fragments, fragments)], smem.words.at[slot], full
            )
            for name in self.s.scale_arrays:
                parts = pl.ds(at * s.scaled_parts, s.scaled_parts)
                ref = getattr(gmem, name).at[parts, pl.ds(block * c.tiles, c.tiles)]
                plgpu.copy_gmem_to_smem(ref, getattr(smem, name).at[slot], full)
            if not self.is_resident:
                depth = pl.ds(at * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(gmem.x.at[rows, depth], smem.x.at[slot], full)

        lax.fori_loop(0, c.steps(s), step, None)
        self.sums.meet_as_bystander()

    @property
    def has_many_sums(self) -> bool:
        """Whether sums need registers taken from the loading warpgroup."""
        return self.sums.count > 32 and self.c.groups == 2

    def compute(self, gmem, smem, first, group: jax.Array) -> None:
        """Multiplies a warpgroup's stages, then adds its columns of all warpgroups' sums."""
        c, s = self.c, self.s
        if self.has_many_sums:
            plgpu.set_max_registers(232, action="increase")
        offer(smem.empty, c.stages, group=group, groups=c.groups)
        if self.is_resident:
            self.rows.place(gmem, smem, smem.x.at[group], first, group)

        def step(turn, sums):
            i = turn * c.groups + group
            slot = lax.rem(i, c.stages)
            plgpu.barrier_wait(smem.full.at[slot])
            x = smem.x.at[group, turn] if self.is_resident else smem.x.at[slot]
            refs = [smem.words.at[slot], x]
            refs += [getattr(smem, name).at[slot] for name in self.s.scale_arrays]
            sums = self.add_stage(sums, refs)
            plgpu.barrier_arrive(smem.empty.at[slot])
            return sums

        turns = lax.div(c.steps(s) + c.groups - 1 - group, c.groups)
        sums = lax.fori_loop(0, turns, step, self.sums.nothing())
        self.sums.finish(sums, gmem, smem, group)

    def add_stage(self, sums: jax.Array, refs: list[Any]) -> jax.Array:
        """Adds the product of one stage to a warpgroup's sums."""
        x_kind = plgpu.RefType(() if self.is_resident else tiled(128))
        kinds = [plgpu.RefType(), x_kind] + [plgpu.RefType()] * (len(refs) - 2)

        held = self.sums.held

        @plgpu.inline_mgpu(arg_types=(held.layout, *kinds), return_type=held.array)
        def add(ctx, sums, *refs):
            del ctx
            return held.wrap(self.stage(held.registers(sums), *refs))

        return add(sums, *refs)

    def stage(self, totals: list[Any], words, x, scales=None, zeros=None) -> list[Any]:
        """Adds the product of one stage to one thread's totals."""
        s, per_lane = self.s, self.s.words_per_lane
        warp, lane = arith.shrui(thread(), constant(5)), arith.andi(thread(), constant(31))
        row = arith.andi(lane, constant(s.places - 1))
        # Of 8 chunks of 16 bytes in a row of x, the place of one is its number xor the row's.
        chunk = arith.xori(arith.shrui(lane, constant(3)), row)
        x_place = total(address(x), (row, 2 * SWIZZLED), (chunk, 16))
        x_places = x_place, arith.xori(x_place, constant(64))
        word_place = total(address(words), (warp, 128 * per_lane), (lane, 4 * per_lane))
        column = total((warp, COLUMNS), arith.shrui(lane, constant(2)))
        scale_place = zero_place = None
        if scales is not None:
            scale_place = total(address(scales), (column, self.scale_dtype.itemsize))
        if zeros is not None:
            zero_place = total(address(zeros), (column, 2))
        nothing = [mgpu.c(0.0, ir.F32Type.get())] * len(totals)
        parts = max(s.scaled_parts, 1)
        blocks = DEPTH // ROWS // parts
        half = 2 * SWIZZLED * s.places
        for part in range(parts):
            taken = self.zero_points(zero_place, part)
            sums = [nothing if s.scaled_parts else totals] + [nothing] * (self.chains - 1)
            for block in range(part * blocks, (part + 1) * blocks):
                half_of_swizzle = x_places[block % 2]
                rows = [
                    load_matrices(half_of_swizzle, half * (2 * strip + block // 2))
                    for strip in range(s.strips)
                ]
                sums = self.add_block(sums, rows, word_place, block, taken)
            joined = [functools.reduce(arith.addf, each) for each in zip(*sums, strict=True)]
            totals = self.scaled(totals, joined, scale_place, part) if s.scaled_parts else joined
        return totals

    def add_block(
        self, apart: list[list[Any]], rows: list[Any], place, block: int, taken: list[Any]
    ) -> list[list[Any]]:
        """Adds products of 32 rows of the weight to ``apart``, a thread's sums per chain."""
        apart = [[*sums] for sums in apart]
        per_lane, strips = self.s.words_per_lane, self.s.strips
        across = WIDTH * self.c.tiles // COLUMNS
        for tile in range(self.c.tiles):
            offset = 128 * per_lane * (block * across + 4 * tile)
            words = load_words(place, offset, per_lane)
            for step in range(2):
                mine = words[step * per_lane // 2 : (step + 1) * per_lane // 2]
                left = self.dequantizer.numbers(mine, taken[tile])
                for strip in range(strips):
                    right = rows[strip][2 * step : 2 * step + 2]
                    sums, at = apart[step % len(apart)], 4 * (tile * strips + strip)
                    sums[at : at + 4] = self.dequantizer.product(left, right, sums[at : at + 4])
        return apart

    def zero_points(self, place: Any | None, part: int) -> list[tuple[Any, Any]]:
        """Returns the zero points of columns g and g + 8 of each tile."""
        if place is None:
            middle = self.dequantizer.zero_pair(None)
            return [(middle, middle)] * self.c.tiles

        def pair(tile: int, r: int) -> Any:
            offset = 2 * (WIDTH * (part * self.c.tiles + tile) + STRIP * r)
            return self.dequantizer.zero_pair(load_number(place, offset, jnp.dtype(jnp.uint16)))

        return [(pair(tile, 0), pair(tile, 1)) for tile in range(self.c.tiles)]

    def scaled(self, totals: list[Any], sums: list[Any], place: Any, part: int) -> list[Any]:
        """Adds one group's sums, multiplied by its scales, to totals."""
        totals, size = [*totals], self.scale_dtype.itemsize
        for tile in range(self.c.tiles):
            at = WIDTH * (part * self.c.tiles + tile)
            scales = [
                load_number(place, size * (at + STRIP * r), self.scale_dtype) for r in range(2)
            ]
            for i in range(4 * self.s.strips):
                number = 4 * self.s.strips * tile + i
                scale = scales[i >> 1 & 1]
                totals[number] = fused(sums[number], scale, totals[number])
        return totals
