"""Product of few rows and a weight in e4m3 on a Hopper GPU, where reading the weight dominates.

A block has some columns of the weight, 64 per warpgroup as the left operand of WGMMA, and all rows
as the right one. One warpgroup fills a ring with tiles of both. Sums are promoted to fp32 after
every 128 products. If there are too few columns for all SMs, K is split: partial sums are written
in fp32, and XLA adds them in the operation that reads the product.

Dims: M row, K contracted, N column of the weight, P part of K.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.scales import BLOCK
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.product import no_sum, product
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import column_layout, row_layout, tiled

MOST_ROWS = 64
GROUP_COLUMNS = 64  # of a warpgroup
_STAGES = 24
_SPLITS = (8, 4, 2, 1)
_RESERVE = 2 * 1024  # bytes of barriers, and gaps between buffers
_SYSTEM_BYTES = 1024  # of each block's shared memory that the system takes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FewRowsConfig:
    """Tile sizes of the kernel; a block has all rows and ``64 * groups`` columns."""

    groups: int = 1  # warpgroups that multiply
    splits: int = 1  # parts of K
    stages: int = 8  # tiles in the ring


def few_rows_config(M: int, N: int, K: int) -> FewRowsConfig:
    """Returns tiles that give every SM a block, or two where there are more columns.

    Measured on an H200 with 64 rows: weights of 17 to 117 MB are read at 2.0 to 3.6 TB/s.
    """
    most = NUM_PROCESSORS * GROUP_COLUMNS
    groups = 2 if most < N and N % (2 * GROUP_COLUMNS) == 0 else 1
    columns, steps = GROUP_COLUMNS * groups, K // BLOCK
    blocks = N // columns
    fitting = (s for s in _SPLITS if steps % s == 0 and blocks * s <= NUM_PROCESSORS)
    splits = next(fitting, 1)
    stage = BLOCK * (columns + M)
    whole = SMEM_BYTES if blocks * splits <= NUM_PROCESSORS else SMEM_BYTES // 2 - _SYSTEM_BYTES
    stages = (whole - _RESERVE - 4 * M * columns) // stage
    return FewRowsConfig(
        groups=groups, splits=splits, stages=max(2, min(stages, _STAGES, steps // splits))
    )


def few_rows_hopper(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: FewRowsConfig | None = None,
    interpretable: bool = False,
) -> jax.Array:
    """Multiplies up to 64 rows, a multiple of 8, by the kernel: [M, N] in ``out_dtype``.

    Args:
        a_scale, b_scale: fp32 [M] and [N].
        interpretable: multiplies by Pallas's own operations, which the interpreter can run.
    """
    (M, K), N = a_MK.shape, b_NK.shape[0]
    config = config or few_rows_config(M, N, K)
    kernel = _FewRowsKernel(
        c=config, M=M, N=N, K=K, out_dtype=out_dtype, interpretable=interpretable
    )
    out = kernel.result({"a": a_MK, "b": b_NK, "a_scale": a_scale, "b_scale": b_scale})
    if config.splits == 1:
        return out
    return (jnp.sum(out, axis=0) * a_scale[:, None] * b_scale[None]).astype(out_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _FewRowsKernel:
    """The kernel of one call; its methods emit the kernel's phases."""

    c: FewRowsConfig
    M: int
    N: int
    K: int
    out_dtype: jnp.dtype
    interpretable: bool

    @property
    def columns(self) -> int:
        """Number of columns of a block."""
        return GROUP_COLUMNS * self.c.groups

    @property
    def num_steps(self) -> int:
        """Number of tiles along one part of K."""
        return self.K // BLOCK // self.c.splits

    def result(self, operands: dict[str, jax.Array]) -> jax.Array:
        """Launches the kernel: [M, N], or fp32 sums [P, M, N] where K is split."""
        c = self.c
        shape, dtype = (self.M, self.N), self.out_dtype
        if c.splits > 1:
            shape, dtype = (c.splits, *shape), jnp.dtype("float32")
        return launch(
            self.run,
            name="few_rows_of_codes",
            operands=operands,
            results={"out": jax.ShapeDtypeStruct(shape, dtype)},
            scratch=self.scratch(),
            num_threads=c.groups + 1,
            grid=(self.N // self.columns, c.splits),
            grid_names=("block", "part"),
        )["out"]

    def scratch(self) -> dict[str, Any]:
        """Returns shared-memory buffers: the ring of tiles, results to store, barriers."""
        c, tile, codes = self.c, tiled(128, itemsize=1), jnp.float8_e4m3fn
        buffers: dict[str, Any] = {
            "a": plgpu.SMEM((c.stages, self.M, BLOCK), codes, transforms=tile),
            "b": plgpu.SMEM((c.stages, self.columns, BLOCK), codes, transforms=tile),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            "empty": plgpu.Barrier(num_arrivals=c.groups, num_barriers=c.stages),
        }
        if c.splits == 1:
            out = (c.groups, self.M, GROUP_COLUMNS)
            stored = tiled(128, itemsize=self.out_dtype.itemsize)
            buffers["out"] = plgpu.SMEM(out, self.out_dtype, transforms=stored)
        return buffers

    def run(self, gmem, smem) -> None:
        """Runs one block: one warpgroup loads tiles, the others multiply."""
        wg, groups = lax.axis_index("wg"), self.c.groups
        pl.when(wg < groups)(functools.partial(self.compute, gmem, smem, wg))
        pl.when(wg == groups)(functools.partial(self.load, gmem, smem))

    def load(self, gmem, smem) -> None:
        """Loads the block's tiles of the rows and of the weight into the ring."""
        columns = pl.ds(lax.axis_index("block") * self.columns, self.columns)
        first = lax.axis_index("part") * self.num_steps

        def step(i, _):
            slot = lax.rem(i, self.c.stages)
            plgpu.barrier_wait(smem.empty.at[slot])
            full, depth = smem.full.at[slot], pl.ds((first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(gmem.b.at[columns, depth], smem.b.at[slot], full)
            plgpu.copy_gmem_to_smem(gmem.a.at[:, depth], smem.a.at[slot], full)

        lax.fori_loop(0, self.num_steps, step, None)
        # No arrival is left without a wait: the interpreter refuses that.
        for slot in range(self.c.stages):
            plgpu.barrier_wait(smem.empty.at[slot])

    def compute(self, gmem, smem, wg) -> None:
        """Computes and stores a warpgroup's 64 columns."""
        for slot in range(self.c.stages):
            plgpu.barrier_arrive(smem.empty.at[slot])
        mine = pl.ds(wg * GROUP_COLUMNS, GROUP_COLUMNS)

        def step(i, total):
            slot = lax.rem(i, self.c.stages)
            plgpu.barrier_wait(smem.full.at[slot])
            part = product(
                smem.b.at[slot, mine], smem.a.at[slot],
                wg=wg, order_barriers=None, interpretable=self.interpretable,
            )  # fmt: skip
            plgpu.barrier_arrive(smem.empty.at[slot])
            return total + part

        total = lax.fori_loop(0, self.num_steps, step, no_sum(self.M))
        self.store(gmem, smem, wg, total)

    def store(self, gmem, smem, wg, total_NM) -> None:
        """Stores a warpgroup's sums, scaled unless K is split."""
        column0 = lax.axis_index("block") * self.columns
        columns = pl.ds(column0 + wg * GROUP_COLUMNS, GROUP_COLUMNS)
        if self.c.splits > 1:
            there = gmem.out.at[lax.axis_index("part")].at[:, columns].transpose((1, 0))
            write_registers(_transposed(total_NM), there)
            return
        b_scale = plgpu.load(gmem.b_scale.at[columns], layout=row_layout(), optimized=False)
        a_scale = plgpu.load(gmem.a_scale, layout=column_layout(), optimized=False)
        scaled = total_NM * lax.broadcast_in_dim(a_scale, total_NM.shape, [1])
        scaled = scaled * lax.broadcast_in_dim(b_scale, total_NM.shape, [0])
        there = smem.out.at[wg].transpose((1, 0))
        there[...] = _transposed(scaled.astype(self.out_dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[wg], gmem.out.at[:, columns])
        plgpu.wait_smem_to_gmem(0)


def _transposed(tile: jax.Array) -> jax.Array:
    """Converts a tile to the layout in which a thread holds neighboring elements of a column."""
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
