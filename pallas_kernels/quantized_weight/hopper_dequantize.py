"""A Hopper kernel that dequantizes an ``arranged`` weight to memory, for a library's matmul.

XLA would gather bytes to undo the fragment order. Here each thread dequantizes the codes of its
fragments. The result is the transposed weight, as a thread has elements that are neighbors in K.

Dims: K row, N column of the weight, G group of rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.cluster_sums import STRIP, WIDTH
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu_utils, plgpu
from pallas_kernels.hopper.resident_rows import DEPTH
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    global_number,
    global_words,
    i32,
    thread,
    total,
    widened_pair,
)
from pallas_kernels.hopper.tile import tiled

from .fragments import Dequantizer
from .weight import COLUMNS, ROWS, QuantizedWeight

MOST_STAGES = 8  # of a block
SLOTS = 2


def dequantized_hopper(weight: QuantizedWeight, dtype: jnp.dtype) -> jax.Array:
    """Dequantizes an arranged weight to [N, K], transposed: in fp32, rounded once."""
    depth, columns = weight.matrix_shape
    stages = next(n for n in range(MOST_STAGES, 0, -1) if depth // DEPTH % n == 0)
    kernel = _DequantizingKernel(
        K=depth,
        N=columns,
        stages=stages,
        group_rows=weight.format.group_rows,
        has_zeros=weight.zeros is not None,
        bits=weight.format.code.bits,
        scale_dtype=jnp.dtype(weight.scales.dtype),
        dequantizer=Dequantizer(code=weight.format.code, dtype=jnp.dtype(dtype)),
    )
    return kernel.result(weight)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _DequantizingKernel:
    """Blocks of 64 columns and some stages of K; one warpgroup."""

    K: int
    N: int
    stages: int
    group_rows: int
    has_zeros: bool
    bits: int
    scale_dtype: jnp.dtype
    dequantizer: Dequantizer

    def result(self, weight: QuantizedWeight) -> jax.Array:
        """Launches the kernel and returns the weight, [N, K]."""
        operands = {"words": weight.data, "scales": weight.scales}
        if weight.zeros is not None:
            operands["zeros"] = weight.zeros
        tile = (SLOTS, WIDTH, DEPTH)
        return launch(
            self.run,
            name="dequantize",
            operands=operands,
            results={"out": jax.ShapeDtypeStruct((self.N, self.K), self.dequantizer.dtype)},
            scratch={"out": plgpu.SMEM(tile, self.dequantizer.dtype, transforms=tiled(128))},
            num_threads=1,
            grid=(self.K // DEPTH // self.stages, self.N // WIDTH),
            grid_names=("depth", "columns"),
        )["out"]

    def run(self, gmem, smem) -> None:
        """Dequantizes stage by stage; each is stored while the next is converted."""
        column = lax.axis_index("columns") * WIDTH
        first = lax.axis_index("depth") * self.stages
        refs = [gmem.words, gmem.scales] + ([gmem.zeros] if self.has_zeros else [])
        number = plgpu.Layout.WG_SPLAT(())
        kinds = [plgpu.RefType(tiled(128)), *[plgpu.RefType()] * len(refs)]

        @plgpu.inline_mgpu(arg_types=(number, number, *kinds))
        def stage(ctx, column, at, out, *refs):
            del ctx
            self.stage(column.registers.flat[0], at.registers.flat[0], out, *refs)

        def step(i, _):
            slot, at = lax.rem(i, SLOTS), first + i
            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            tile = smem.out.at[slot]
            stage(jnp.broadcast_to(column, ()), jnp.broadcast_to(at, ()), tile, *refs)
            plgpu.commit_smem()
            place = gmem.out.at[pl.ds(column, WIDTH), pl.ds(at * DEPTH, DEPTH)]
            plgpu.copy_smem_to_gmem(tile, place)

        lax.fori_loop(0, self.stages, step, None)
        plgpu.wait_smem_to_gmem(0)

    def stage(self, column, at, out, words, scales, zeros=None) -> None:
        """Dequantizes 128 rows of 64 columns, of which a warp has 16."""
        per_lane = self.bits // 2
        warp, lane = arith.shrui(thread(), constant(5)), arith.andi(thread(), constant(31))
        g, t = arith.shrui(lane, constant(2)), arith.andi(lane, constant(3))
        fragment = total(arith.divui(column, constant(COLUMNS)), warp)
        block = total((at, DEPTH // ROWS))
        found = []
        for i in range(DEPTH // ROWS):
            index = total((total(block, constant(i)), self.N // COLUMNS), fragment)
            index = total((index, 32 * per_lane), (lane, per_lane))
            found.append(global_words(words, index, per_lane))
        mine = total(column, (warp, COLUMNS), g)
        parts = DEPTH // self.group_rows if self.group_rows else 1
        base = total(address(out), (warp, 4 * 1024), (g, 128), (t, 4))
        taken, factors = self.zero_points(None, None), []
        for i in range(DEPTH // ROWS):
            if i % (DEPTH // ROWS // parts) == 0:
                group = total((at, parts), constant(i * parts * ROWS // DEPTH))
                row = total((group, self.N), mine) if self.group_rows else mine
                factors = [global_number(scales, row, STRIP * r, self.scale_dtype) for r in (0, 1)]
                taken = self.zero_points(zeros, row)
            for step in range(2):
                half = found[i][step * per_lane // 2 : (step + 1) * per_lane // 2]
                for r, pair in enumerate(self.dequantizer.numbers(half, taken)):
                    chunk = constant(4 * (i % 2) + 2 * step + (r >> 1))
                    place = total(base, (arith.xori(chunk, g), 16))
                    offset = 2048 * (r & 1) + 1024 * (i // 2)
                    text = f"st.shared.b32 [$0+{offset}], $1;"
                    scaled = self.scaled(pair, factors[r & 1])
                    assembly(None, [place, scaled], text, "r,r", pure=False)

    def zero_points(self, zeros: Any | None, row: Any) -> tuple[Any, Any]:
        """Returns the zero points of columns g and g + 8."""
        if zeros is None:
            return (self.dequantizer.zero_pair(None),) * 2
        i64, i16 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(16)
        place = arith.addi(
            llvm.ptrtoint(i64, mgpu_utils.memref_ptr(zeros)),
            arith.extui(i64, total((row, 2))),
        )
        found = [
            assembly(
                i16, [place], f"ld.global.nc.b16 $0, [$1+{2 * STRIP * r}];", "=h,l", pure=False
            )
            for r in range(2)
        ]
        low, high = (self.dequantizer.zero_pair(arith.extui(i32(), each)) for each in found)
        return low, high

    def scaled(self, pair: Any, factor: Any) -> Any:
        """Multiplies two numbers by a scale in fp32, rounded once."""
        low, high = (arith.mulf(x, factor) for x in widened_pair(pair, self.dequantizer.dtype))
        text = f"cvt.rn.{self.dequantizer.name}x2.f32 $0, $2, $1;"
        return assembly(i32(), [low, high], text, "=r,f,f", pure=True)
