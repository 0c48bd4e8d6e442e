"""The fused kernel for Hopper GPUs: 1 to 8 rows times a 16-bit weight, with norm, SwiGLU, residual.

The transposed product is computed: WGMMA's left operand is 64 columns of the weight, its right
operand all rows of x. These stay in shared memory, normalized if the call has a norm. A cluster has
some columns and splits K among its blocks. In a block one warpgroup fills a ring with tiles of the
weight and another multiplies. The cluster's sums are added in a fixed order, with the residual if
any, and rounded once.

Dims: M row, K contracted, N column of the weight, F column of the result.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.cluster_sums import WIDTH, ClusterSums
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPGROUP
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.resident_rows import DEPTH, MOST_ROWS, ResidentRows
from pallas_kernels.hopper.ring import offer
from pallas_kernels.hopper.tile import tiled

from .config import FusedConfig, ProductShape
from .reference import FewRowsCall


def fused_matmul(call: FewRowsCall, *, config: FusedConfig) -> jax.Array:
    """Computes the whole call, [M, F], by the fused kernel with tiles that fit the product."""
    s, w_KN = call.shape, call.weight
    assert isinstance(w_KN, jax.Array), "quantized weights have a kernel of their own"
    rows = ResidentRows(
        M=s.M,
        K=s.K,
        dtype=call.x.dtype,
        steps=s.K // DEPTH // config.split,
        norm=call.norm,
        gated=call.swiglu_input,
    )
    sums = ClusterSums(
        rows=s.M,
        rows_at_a_time=s.M,
        columns=call.num_outputs,
        tiles=config.tiles,
        split=config.split,
        groups=1,
        out_dtype=call.x.dtype,
        gated=call.swiglu,
        has_residual=call.residual is not None,
    )
    operands = {"x": call.x, "w": w_KN, **rows.operands()}
    if call.residual is not None:
        operands["residual"] = call.residual
    return FusedMatmulKernel(c=config, s=s, rows=rows, sums=sums).result(operands)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FusedMatmulKernel:
    """The fused kernel of one call; its methods emit the kernel's phases."""

    c: FusedConfig
    s: ProductShape
    rows: ResidentRows
    sums: ClusterSums

    @property
    def parts(self) -> int:
        """Number of pieces of a weight tile: 2, gate and up, for a gated product, else 1."""
        return 2 if self.sums.gated else 1

    @property
    def part_n(self) -> int:
        """Number of columns in one piece of a weight tile."""
        return WIDTH * self.c.tiles // self.parts

    @property
    def num_stages(self) -> int:
        """Number of weight tiles that the ring holds."""
        return self.c.num_stages(self.s)

    def result(self, operands: dict[str, jax.Array]) -> jax.Array:
        """Launches the kernel and returns the result, [M, F]."""
        shape = (self.sums.rows, self.sums.columns)
        return launch(
            self.run,
            name="fused_matmul",
            operands=operands,
            results={"out": jax.ShapeDtypeStruct(shape, self.sums.out_dtype)},
            scratch=self.scratch(),
            num_threads=2,
            grid=(self.s.N // (WIDTH * self.c.tiles), 1),
            grid_names=("columns", "rows"),
            cluster=(self.c.split,),
            cluster_names=("cluster",),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """Returns shared-memory buffers: the ring, x, sums and barriers."""
        stages, depth, dtype = self.num_stages, self.c.depth, self.rows.dtype
        x, w = (self.c.steps(self.s), MOST_ROWS, depth), (stages, self.parts, depth, self.part_n)
        return {
            "x": plgpu.SMEM(x, dtype, transforms=tiled(128)),
            "w": plgpu.SMEM(w, dtype, transforms=tiled(128)),
            "sums": plgpu.SMEM((1, self.sums.count * WARPGROUP), jnp.float32),
            **self.rows.scratch(),
            "full": plgpu.Barrier(num_arrivals=self.parts, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: one warpgroup loads weight tiles, one multiplies."""
        wg = lax.axis_index("wg")
        first = lax.axis_index("cluster") * self.rows.steps
        pl.when(wg == 0)(functools.partial(self.compute, gmem, smem, first))
        pl.when(wg == 1)(functools.partial(self.load, gmem, smem))

    def load(self, gmem, smem) -> None:
        """Loads the block's tiles of the weight into the ring."""
        block, depth, steps = lax.axis_index("columns"), self.c.depth, self.c.steps(self.s)
        first = lax.axis_index("cluster") * steps

        def step(i, _):
            slot = lax.rem(i, self.num_stages)
            plgpu.barrier_wait(smem.empty.at[slot])
            rows = pl.ds((first + i) * depth, depth)
            for part in range(self.parts):
                columns = pl.ds(part * (self.s.N // self.parts) + block * self.part_n, self.part_n)
                plgpu.copy_gmem_to_smem(
                    gmem.w.at[rows, columns], smem.w.at[slot, part], smem.full.at[slot]
                )

        lax.fori_loop(0, steps, step, None)
        self.sums.meet_as_bystander()

    def compute(self, gmem, smem, first) -> None:
        """Stores x in shared memory, multiplies it by the ring's tiles, adds the cluster's sums."""
        offer(smem.empty, self.num_stages)
        self.rows.place(gmem, smem, smem.x, first, jnp.int32(0), transforms=tiled(128))
        plgpu.commit_smem()

        def multiply(*accs):
            def step(i, _):
                slot = lax.rem(i, self.num_stages)
                plgpu.barrier_wait(smem.full.at[slot])
                for part, acc in enumerate(accs):
                    columns = smem.w.at[slot, part].transpose((1, 0))
                    plgpu.wgmma(acc, columns, smem.x.at[i].transpose((1, 0)))
                plgpu.wgmma_wait(len(accs))
                # The products of the step before are over.
                before = lax.rem(i + self.num_stages - 1, self.num_stages)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[before]))

            lax.fori_loop(0, self.c.steps(self.s), step, None)
            return [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accs]

        acc = plgpu.ACC((self.part_n, MOST_ROWS), jnp.float32)
        sums = self.together(pl.run_scoped(multiply, *[acc] * self.parts))
        self.sums.finish(sums, gmem, smem, jnp.int32(0))

    def together(self, sums: list[jax.Array]) -> jax.Array:
        """Joins the sums of all tiles in the order of ``ClusterSums``."""
        held = self.sums.held

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * len(sums), return_type=held.array)
        def join(ctx, *sums):
            del ctx
            numbers = [x for each in sums for x in held.registers(each)]
            return held.wrap(numbers)

        return join(*sums)
