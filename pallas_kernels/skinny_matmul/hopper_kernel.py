"""Matmuls of a few rows on a Hopper GPU: the weight is read once, at the memory's rate.

A block has some columns of the weight and all rows of x: one warpgroup fills a ring with tiles of
both, others multiply 64 rows each. Where columns are too few for all multiprocessors, K is split:
parts leave in fp32, and XLA adds them in the operation that reads the product. Results are rounded
once either way. Tiles of x come out of L2 once for each cluster, whose blocks share the copies.

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
from pallas_kernels.hopper.tile import swizzle_bytes, tiled

from .config import ROWS, SkinnyConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SkinnyKernel:
    """The kernel of one call; methods are its phases, written once per trace."""

    c: SkinnyConfig
    M: int  # with those that tiles ask for: they are read as zeros, and not written
    rows: int
    K: int
    N: int
    dtype: jnp.dtype
    swiglu: bool

    @property
    def parts(self) -> int:
        """Pieces of a tile of the weight: of a gated product, columns of gate and of up."""
        return 2 if self.swiglu else 1

    @property
    def part_n(self) -> int:
        """Columns of a piece, and of a block's result."""
        return self.c.tile_n // self.parts

    @property
    def num_stages(self) -> int:
        """Tiles in the ring."""
        return self.c.num_stages(self.M, swiglu=self.swiglu)

    @property
    def num_steps(self) -> int:
        """Tiles of a part of K."""
        return self.K // self.c.depth // self.c.splits

    def result(self, x_MK: jax.Array, w_KN: jax.Array) -> jax.Array:
        """[M, N], or [M, F]; fp32 [P, M, N] where K is split."""
        c = self.c
        shape, dtype = (self.rows, self.N // self.parts), self.dtype
        if c.splits > 1:
            shape, dtype = (c.splits, *shape), jnp.dtype("float32")
        return launch(
            self.run,
            name="skinny_matmul",
            operands={"x": x_MK, "w": w_KN},
            results={"out": jax.ShapeDtypeStruct(shape, dtype)},
            scratch=self.scratch(),
            num_threads=c.num_warpgroups(self.M) + 1,
            grid=(self.N // c.tile_n // c.cluster, c.splits),
            grid_names=("block", "part"),
            cluster=(c.cluster,),
            cluster_names=("cluster",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """The ring of tiles, results on their way out, barriers."""
        c, staged = self.c, self.c.staged_rows(self.M)
        wide = tiled(swizzle_bytes(self.part_n))
        empty: Any = plgpu.Barrier
        if c.cluster > 1:
            empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
        return {
            "x": plgpu.SMEM((self.num_stages, staged, c.depth), self.dtype, transforms=wide),
            "w": plgpu.SMEM(
                (self.num_stages, self.parts, c.depth, self.part_n), self.dtype, transforms=wide
            ),
            "full": plgpu.Barrier(num_arrivals=1 + self.parts, num_barriers=self.num_stages),
            "empty": empty(num_arrivals=c.num_warpgroups(self.M), num_barriers=self.num_stages),
        } | self.staged_results(staged)

    def staged_results(self, rows: int) -> dict[str, Any]:
        """Shared memory of results on their way out."""
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
        """One block: a role for each warpgroup."""
        wg = lax.axis_index("wg")
        groups = self.c.num_warpgroups(self.M)
        block = lax.axis_index("block") * self.c.cluster + lax.axis_index("cluster")
        for group in range(groups):
            pl.when(wg == group)(functools.partial(self.compute, gmem, smem, block, group))
        pl.when(wg == groups)(functools.partial(self.load, gmem, smem, block))

    def all_rows(self, first: int, count: int) -> Any:
        """A slice beyond the last row, of which the copy engine reads zeros and writes nothing."""
        return pl.ds(first + 0 * lax.axis_index("block"), count)

    def load(self, gmem, smem, block) -> None:
        """Fills the ring."""
        c = self.c
        sharing = "cluster" if c.cluster > 1 else None

        def step(i, _):
            slot = lax.rem(i, self.num_stages)
            depth = pl.ds((lax.axis_index("part") * self.num_steps + i) * c.depth, c.depth)
            plgpu.barrier_wait(smem.empty.at[slot])
            full = smem.full.at[slot]
            for part in range(self.parts):
                columns = pl.ds(part * (self.N // self.parts) + block * self.part_n, self.part_n)
                plgpu.copy_gmem_to_smem(gmem.w.at[depth, columns], smem.w.at[slot, part], full)
            plgpu.copy_gmem_to_smem(
                gmem.x.at[self.all_rows(0, self.M), depth],
                smem.x.at[slot, pl.ds(0, self.M)],
                full,
                collective_axes=sharing,
            )  # fmt: skip

        lax.fori_loop(0, self.num_steps, step, None)
        # Nobody leaves while another block of the cluster still copies into it.
        for slot in range(self.num_stages):
            plgpu.barrier_wait(smem.empty.at[slot])

    def compute(self, gmem, smem, block, group: int) -> None:
        """A warpgroup's share of the block's results."""
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
        if self.swiglu:
            pairs = zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True)
            sums = [gate / (1.0 + jnp.exp(-gate)) * up for gate, up in pairs]
        self.leave(gmem, smem, block, group, sums)

    def accumulators(self) -> list[Any]:
        """Of a warpgroup: of gates before those of ups."""
        return [plgpu.ACC((ROWS, self.part_n), jnp.float32)] * self.parts

    def issue(self, smem, slot, group: int, accs: Sequence[Any]) -> None:
        """Products of a tile, each in a group of its own."""
        for part, acc in enumerate(accs):
            plgpu.wgmma(acc, smem.x.at[slot, pl.ds(group * ROWS, ROWS)], smem.w.at[slot, part])

    def leave(self, gmem, smem, block, group: int, results: Sequence[jax.Array]) -> None:
        """Writes 64 rows of the block's columns."""
        (result,), first = results, group * ROWS
        smem.out[pl.ds(first, ROWS)] = result.astype(smem.out.dtype)
        plgpu.commit_smem()
        count = min(ROWS, self.M - first)
        rows, columns = self.all_rows(first, count), pl.ds(block * self.part_n, self.part_n)
        plgpu.copy_smem_to_gmem(
            smem.out.at[pl.ds(first, count)], self.part_of(gmem.out).at[rows, columns]
        )
        plgpu.wait_smem_to_gmem(0)

    def part_of(self, out: Any) -> Any:
        """Where sums of the block's part of K belong."""
        return out if self.c.splits == 1 else out.at[lax.axis_index("part")]
