"""The gradient of a group's weight on a Hopper GPU: x^T d over the group's rows.

A tile is 128 rows and 256 columns of one group's gradient; its contraction is as long as the group.
Rows are copied 64 at a time from the multiple of 8 before the group, so that the first and the last
step hold rows of other groups: they are zeroed where they lie, while the step before is multiplied.

Dims: M row, G group, K width of x, N width of d.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.tile import WGMMA

from .config import (
    BLOCK_DEPTH,
    BLOCK_ROWS,
    NUM_COMPUTE,
    WARPGROUP_ROWS,
    WIDTH_MULTIPLE,
    GroupedConfig,
)
from .ring import COMPILER_PARAMS, RingKernel
from .schedule import ROW_MULTIPLE


def grouped_weight_gradient(
    x_MK: jax.Array,
    d_MN: jax.Array,
    group_sizes_G: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: GroupedConfig,
) -> jax.Array:
    """[G, K, N], 0 for a group without rows.

    Args:
        x_MK: M is a multiple of 8 and at least 64, K of 64 and at least 128.
        d_MN: N is a multiple of 64.
        group_sizes_G: int32, in sum at most M; rows beyond may be NaN.
        out_dtype: sums are fp32 and rounded to it once.
        config: tiles.
    """
    num_groups = group_sizes_G.shape[0]
    kernel = _WeightGradient(
        c=config,
        dtype=x_MK.dtype,
        out_dtype=jnp.dtype(out_dtype),
        num_rows=x_MK.shape[0],
        num_groups=num_groups,
        width=x_MK.shape[1],
        num_columns=d_MN.shape[1],
    )
    ends_G = jnp.cumsum(group_sizes_G).astype(jnp.int32)
    return launch(
        kernel.run,
        operands={"ends": jnp.pad(ends_G, (1, 0)), "x": x_MK, "d": d_MN},
        results={
            "out": jax.ShapeDtypeStruct((num_groups, kernel.width, kernel.num_columns), out_dtype)
        },
        scratch=kernel.scratch(),
        grid=(NUM_PROCESSORS,),
        grid_names=("worker",),
        num_threads=NUM_COMPUTE + 1,
        compiler_params=COMPILER_PARAMS,
    )["out"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _WeightGradient(RingKernel):
    """The kernel of one call."""

    num_rows: int
    num_groups: int
    width: int
    num_columns: int

    def scratch(self) -> dict[str, Any]:
        ring = self.shared(a=(BLOCK_DEPTH, BLOCK_ROWS), b=(BLOCK_DEPTH, self.c.columns))
        return {**ring, "masked": plgpu.Barrier(num_arrivals=NUM_COMPUTE)}

    def each_tile(self, gmem: Any, body: Any) -> None:
        """Calls ``body((group, its first row, its end), first row and column of the result, steps
        before)`` for this block's tiles.
        """
        worker = lax.axis_index("worker")
        shape = -(-self.width // BLOCK_ROWS), -(-self.num_columns // self.c.columns)
        per_group = shape[0] * shape[1]
        num_tiles = self.num_groups * per_group

        def fetch(index):
            index = jnp.minimum(index, num_tiles - 1)
            group = lax.div(index, jnp.int32(per_group))
            inside = lax.rem(index, jnp.int32(per_group))
            m, n = plgpu.planar_snake(inside, shape, self.c.across, self.c.band)
            rows = group, gmem.ends[group], gmem.ends[group + 1]
            return rows, (m * BLOCK_ROWS, n * self.c.columns)

        def step(i, carry):
            done, rows, at = carry
            ahead = fetch(worker + (i + 1) * NUM_PROCESSORS)
            body(rows, at, done)
            return done + self.num_steps(rows), *ahead

        count = lax.div(num_tiles - worker + NUM_PROCESSORS - 1, NUM_PROCESSORS)
        lax.fori_loop(0, count, step, (jnp.int32(0), *fetch(worker)))

    def num_steps(self, rows: Any) -> jax.Array:
        """Of a tile."""
        _, first, end = rows
        steps = lax.div(end - self.first_read(rows) + BLOCK_DEPTH - 1, BLOCK_DEPTH)
        return jnp.where(end > first, steps, 0)

    def first_read(self, rows: Any) -> jax.Array:
        """The row that the group's first step begins with."""
        return rows[1] - lax.rem(rows[1], ROW_MULTIPLE)

    def load(self, gmem: Any, smem: Any, rows: Any, at: Any, done: Any) -> None:
        """Fills the ring with the operands of one tile."""
        first, (row, column) = self.first_read(rows), at
        x_columns = pl.ds(pl.multiple_of(row, BLOCK_ROWS), BLOCK_ROWS)
        d_columns = pl.ds(pl.multiple_of(column, WIDTH_MULTIPLE), self.c.columns)

        def step(i, _):
            slot = self.slot(done + i)
            full = smem.full.at[slot]
            depths = pl.ds(pl.multiple_of(first + i * BLOCK_DEPTH, ROW_MULTIPLE), BLOCK_DEPTH)
            plgpu.barrier_wait(smem.empty.at[slot])
            plgpu.copy_gmem_to_smem(gmem.x.at[depths, x_columns], smem.a.at[slot], full)
            plgpu.copy_gmem_to_smem(gmem.d.at[depths, d_columns], smem.b.at[slot], full)

        lax.fori_loop(0, self.num_steps(rows), step, None)

    def compute(self, gmem: Any, smem: Any, wg: Any, rows: Any, at: Any, done: Any) -> None:
        """This warpgroup's rows of one tile."""
        row = pl.multiple_of(at[0] + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        value = self.multiply(gmem, smem, wg, rows, done)
        parts = []
        for j in range(0, self.c.columns, self.line):

            def place(offset, size, j=j):
                columns = pl.ds(pl.multiple_of(at[1] + j, self.line), self.line)
                return gmem.out.at[rows[0], pl.ds(row + offset, size), columns]

            parts.append((lax.slice(value, (0, j), (WARPGROUP_ROWS, j + self.line)), place))
        self.store_whole(smem, wg, parts)

    def multiply(self, gmem: Any, smem: Any, wg: Any, rows: Any, done: Any) -> jax.Array:
        """fp32 [64, columns]."""
        mine = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)
        num_steps, first_read = self.num_steps(rows), self.first_read(rows)
        _, first, end = rows
        # Rows of no group may be NaN in both operands; of another group they count on its own.
        is_last_group = end == gmem.ends[self.num_groups]

        def product(acc):
            def step(k, _):
                slot = self.slot(done + k)
                a = smem.a.at[slot, :, mine]
                row = first_read + k * BLOCK_DEPTH
                kept = (
                    jnp.clip(first - row, 0, BLOCK_DEPTH),
                    jnp.clip(end - row, 0, BLOCK_DEPTH),
                )
                plgpu.barrier_wait(smem.full.at[slot])

                @pl.when((kept[0] > 0) | (kept[1] < BLOCK_DEPTH))
                def _():
                    self.mask(a, kept)

                @pl.when((kept[1] < BLOCK_DEPTH) & is_last_group)
                def _():
                    half = self.c.columns // NUM_COMPUTE
                    self.mask(smem.b.at[slot, :, pl.ds(pl.multiple_of(wg * half, 64), half)], kept)
                    plgpu.barrier_arrive(smem.masked)
                    plgpu.barrier_wait(smem.masked)

                plgpu.wgmma(acc, a.transpose((1, 0)), smem.b.at[slot])
                plgpu.wgmma_wait(1)
                # The step before this one is multiplied.
                pl.when(k > 0)(
                    lambda: plgpu.barrier_arrive(smem.empty.at[self.slot(done + k - 1)])
                )

            lax.fori_loop(0, num_steps, step, None)
            value = acc[...]

            @pl.when(num_steps > 0)
            def _():
                plgpu.barrier_arrive(smem.empty.at[self.slot(done + num_steps - 1)])

            return value

        return pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, self.c.columns), jnp.float32))

    def mask(self, ref: Any, kept: Any) -> None:
        """Zeroes rows of a tile other than those from ``kept[0]`` to ``kept[1]``."""
        tile = plgpu.load(ref, layout=WGMMA, optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=WGMMA)
        is_kept = (row >= kept[0]) & (row < kept[1])
        ref[...] = jnp.where(is_kept, tile, jnp.zeros((), tile.dtype))
        plgpu.commit_smem()
