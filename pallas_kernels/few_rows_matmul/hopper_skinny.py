"""The skinny kernel for Hopper GPUs: 1 to 256 rows times a 16-bit weight, which is read once.

A block has some columns of the weight and all rows of x: one warpgroup fills a ring with tiles of
both, others multiply 64 rows each. If there are too few columns for all SMs, K is split: partial
sums are written in fp32, and XLA adds them in the operation that reads the product. Results are
rounded once either way. A step of the ring takes about 165 ns whatever its tile, so up to 64 rows
of x, steps of 128 rows of the weight are faster.

The transposed form is for many rows of x and narrow tiles. WGMMA reads both operands from shared
memory, 64 rows of the left one at a time: a 64 x 64 product takes as long to read as to multiply,
and TMA writes add to that. So 64 columns of the weight are the left operand, and half of all rows
of x the right one. With 256 rows this takes 4 to 17% less time.

Dims: M row, K contracted, N column of the weight, F column of the result of a gated product, P part
of K.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import swizzle_bytes, tiled

from .config import GROUP_ROWS, ROW_MULTIPLE, TRANSPOSED_WARPGROUPS, ProductShape, SkinnyConfig


def skinny_matmul(
    x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool, config: SkinnyConfig
) -> jax.Array:
    """Computes ``product_reference`` by the skinny kernel with tiles that fit the product."""
    rows, s = x_MK.shape[0], ProductShape.of(x_MK.shape[0], w_KN, swiglu=swiglu)
    if s.M > ROW_MULTIPLE:  # copies may go beyond the last row of a single tile of rows only
        x_MK = jnp.pad(x_MK, ((0, s.padded_rows - rows), (0, 0)))
    kind = TransposedKernel if config.transposed else SkinnyKernel
    result = kind(c=config, s=s, rows=x_MK.shape[0], dtype=x_MK.dtype).result(x_MK, w_KN)
    if config.splits > 1:
        result = jnp.sum(result, axis=0).astype(x_MK.dtype)
    return result[:rows]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SkinnyKernel:
    """The skinny kernel of one call; its methods emit the kernel's phases."""

    c: SkinnyConfig
    s: ProductShape
    rows: int  # of x and the result; further rows of tiles are read as zeros and not written
    dtype: jnp.dtype

    @property
    def parts(self) -> int:
        """Number of pieces of a weight tile: 2, gate and up, for a gated product, else 1."""
        return 2 if self.s.swiglu else 1

    @property
    def part_n(self) -> int:
        """Number of columns in one piece of a weight tile, and in a block's result."""
        return self.c.tile_n // self.parts

    @property
    def num_stages(self) -> int:
        """Number of tiles that the ring holds."""
        return self.c.num_stages(self.s)

    @property
    def num_steps(self) -> int:
        """Number of tiles along one split of K."""
        return self.s.K // self.c.depth // self.c.splits

    def result(self, x_MK: jax.Array, w_KN: jax.Array) -> jax.Array:
        """Launches the kernel: [M, N] or [M, F], or fp32 [P, M, N] where K is split."""
        c = self.c
        shape, dtype = (self.rows, self.s.N // self.parts), self.dtype
        if c.splits > 1:
            shape, dtype = (c.splits, *shape), jnp.dtype("float32")
        return launch(
            self.run,
            name="skinny_matmul",
            operands={"x": x_MK, "w": w_KN},
            results={"out": jax.ShapeDtypeStruct(shape, dtype)},
            scratch=self.scratch(),
            num_threads=c.num_warpgroups(self.s) + 1,
            grid=(self.s.N // c.tile_n, c.splits),
            grid_names=("block", "part"),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """Returns shared-memory buffers: the ring of tiles, results to store, barriers."""
        c, staged = self.c, self.c.staged_rows(self.s)
        wide = tiled(swizzle_bytes(self.part_n))
        return {
            "x": plgpu.SMEM((self.num_stages, staged, c.depth), self.dtype, transforms=wide),
            "w": plgpu.SMEM(
                (self.num_stages, self.parts, c.depth, self.part_n), self.dtype, transforms=wide
            ),
            "full": plgpu.Barrier(num_arrivals=1 + self.parts, num_barriers=self.num_stages),
            "empty": plgpu.Barrier(
                num_arrivals=c.num_warpgroups(self.s), num_barriers=self.num_stages
            ),
        } | self.staged_results(staged)

    def staged_results(self, rows: int) -> dict[str, Any]:
        """Returns the shared-memory buffers of results to store."""
        c = self.c
        swizzle = swizzle_bytes(self.part_n, itemsize=c.out_bytes)
        return {
            "out": plgpu.SMEM(
                (rows, self.part_n),
                self.dtype if c.splits == 1 else jnp.float32,
                transforms=tiled(swizzle, itemsize=c.out_bytes),
            )
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: one warpgroup loads tiles, the others multiply."""
        wg = lax.axis_index("wg")
        groups = self.c.num_warpgroups(self.s)
        block = lax.axis_index("block")
        for group in range(groups):
            pl.when(wg == group)(functools.partial(self.compute, gmem, smem, block, group))
        pl.when(wg == groups)(functools.partial(self.load, gmem, smem, block))

    def all_rows(self, first: int, count: int) -> Any:
        """Returns a slice of rows; TMA reads zeros and writes nothing beyond the last row."""
        return pl.ds(first + 0 * lax.axis_index("block"), count)

    def load(self, gmem, smem, block) -> None:
        """Loads the block's tiles of x and of the weight into the ring."""
        c = self.c

        def step(i, _):
            slot = lax.rem(i, self.num_stages)
            depth = pl.ds((lax.axis_index("part") * self.num_steps + i) * c.depth, c.depth)
            plgpu.barrier_wait(smem.empty.at[slot])
            full = smem.full.at[slot]
            for part in range(self.parts):
                columns = pl.ds(part * (self.s.N // self.parts) + block * self.part_n, self.part_n)
                plgpu.copy_gmem_to_smem(gmem.w.at[depth, columns], smem.w.at[slot, part], full)
            rows = self.s.padded_rows
            plgpu.copy_gmem_to_smem(
                gmem.x.at[self.all_rows(0, rows), depth], smem.x.at[slot, pl.ds(0, rows)], full
            )

        lax.fori_loop(0, self.num_steps, step, None)
        # No arrival is left without a wait: the interpreter refuses that.
        for slot in range(self.num_stages):
            plgpu.barrier_wait(smem.empty.at[slot])

    def compute(self, gmem, smem, block, group: int) -> None:
        """Computes a warpgroup's part of the block's results."""
        for slot in range(self.num_stages):
            plgpu.barrier_arrive(smem.empty.at[slot])

        def multiply(*accs):
            def step(i, _):
                slot = lax.rem(i, self.num_stages)
                plgpu.barrier_wait(smem.full.at[slot])
                self.issue(smem, slot, group, accs)
                plgpu.wgmma_wait(len(accs))
                # The products of the step before are over.
                before = lax.rem(i + self.num_stages - 1, self.num_stages)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[before]))

            lax.fori_loop(0, self.num_steps, step, None)
            last = (self.num_steps - 1) % self.num_stages
            sums = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accs]
            plgpu.barrier_arrive(smem.empty.at[last])
            return sums

        sums = pl.run_scoped(multiply, *self.accumulators())
        if self.s.swiglu:
            pairs = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
            sums = [gate / (1.0 + jnp.exp(-gate)) * up for gate, up in pairs]
        self.write_results(gmem, smem, block, group, sums)

    def accumulators(self) -> list[Any]:
        """Returns a warpgroup's accumulators, those of gates first."""
        return [plgpu.ACC((GROUP_ROWS, self.part_n), jnp.float32)] * self.parts

    def issue(self, smem, slot, group: int, accs: Sequence[Any]) -> None:
        """Issues the MMAs of a tile, each piece in a WGMMA group of its own."""
        for part, acc in enumerate(accs):
            plgpu.wgmma(
                acc, smem.x.at[slot, pl.ds(group * GROUP_ROWS, GROUP_ROWS)], smem.w.at[slot, part]
            )

    def write_results(self, gmem, smem, block, group: int, results: Sequence[jax.Array]) -> None:
        """Stores a warpgroup's 64 rows of the block's columns."""
        (result,), first = results, group * GROUP_ROWS
        smem.out[pl.ds(first, GROUP_ROWS)] = result.astype(smem.out.dtype)
        plgpu.commit_smem()
        count = min(GROUP_ROWS, self.s.padded_rows - first)
        rows, columns = self.all_rows(first, count), pl.ds(block * self.part_n, self.part_n)
        plgpu.copy_smem_to_gmem(
            smem.out.at[pl.ds(first, count)], self.part_of(gmem.out).at[rows, columns]
        )
        plgpu.wait_smem_to_gmem(0)

    def part_of(self, out: Any) -> Any:
        """Returns the part of the result that holds the sums of the block's split of K."""
        return out if self.c.splits == 1 else out.at[lax.axis_index("part")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedKernel(SkinnyKernel):
    """The transposed skinny kernel: a warpgroup has half the rows, 64 columns per accumulator."""

    @property
    def rows_each(self) -> int:
        """Number of rows that one warpgroup multiplies."""
        return self.s.padded_rows // TRANSPOSED_WARPGROUPS

    @property
    def strips(self) -> range:
        """First column of each accumulator, within the ``part_n`` columns of a weight tile."""
        return range(0, self.part_n, GROUP_ROWS)

    def accumulators(self) -> list[Any]:
        """Returns a warpgroup's accumulators, [N, M] each."""
        acc = plgpu.ACC((GROUP_ROWS, self.rows_each), jnp.float32)
        return [acc] * (self.parts * len(self.strips))

    def issue(self, smem, slot, group: int, accs: Sequence[Any]) -> None:
        """Issues the MMAs of a tile, each accumulator in a WGMMA group of its own."""
        x_KM = smem.x.at[slot, pl.ds(group * self.rows_each, self.rows_each)].transpose((1, 0))
        places = [(part, first) for part in range(self.parts) for first in self.strips]
        for acc, (part, first) in zip(accs, places, strict=True):
            w_KN = smem.w.at[slot, part, :, pl.ds(first, GROUP_ROWS)]
            plgpu.wgmma(acc, w_KN.transpose((1, 0)), x_KM)

    def staged_results(self, rows: int) -> dict[str, Any]:
        """Returns the buffers of results to store; splits of K are stored from registers."""
        return {} if self.c.splits > 1 else super().staged_results(rows)

    def write_results(self, gmem, smem, block, group: int, results: Sequence[jax.Array]) -> None:
        """Stores a warpgroup's half of the rows of the block's columns."""
        rows = pl.ds(group * self.rows_each, self.rows_each)
        for first, result_NM in zip(self.strips, results, strict=True):
            if self.c.splits > 1:
                columns = pl.ds(block * self.part_n + first, GROUP_ROWS)
                there = self.part_of(gmem.out).at[rows, columns].transpose((1, 0))
                write_registers(transposed(result_NM), there)
            else:
                there = smem.out.at[rows, pl.ds(first, GROUP_ROWS)].transpose((1, 0))
                there[...] = transposed(result_NM.astype(self.dtype))
        if self.c.splits == 1:
            plgpu.commit_smem()
            columns = pl.ds(block * self.part_n, self.part_n)
            plgpu.copy_smem_to_gmem(smem.out.at[rows], gmem.out.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)


def transposed(tile: jax.Array) -> jax.Array:
    """Converts a tile to the layout in which a thread holds neighboring elements of a column."""
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
