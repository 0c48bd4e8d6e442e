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
    ROW_MULTIPLE,
    WARPGROUP_ROWS,
    WIDTH_MULTIPLE,
    GroupedConfig,
)
from .ring import COMPILER_PARAMS, RingKernel


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
    return launch(
        kernel.run,
        operands={"sizes": group_sizes_G, "x": x_MK, "d": d_MN},
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

    width: int
    num_columns: int

    def scratch(self) -> dict[str, Any]:
        ring = self.shared(a=(BLOCK_DEPTH, BLOCK_ROWS), b=(BLOCK_DEPTH, self.c.columns))
        return {**ring, "masked": plgpu.Barrier(num_arrivals=NUM_COMPUTE)}

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of one group."""
        return -(-self.width // BLOCK_ROWS), -(-self.num_columns // self.c.columns)

    def constants(self, gmem: Any) -> jax.Array:
        """The end of the last group."""

        def step(group, end):
            return end + self.size(gmem, group, end)

        return lax.fori_loop(0, self.num_groups, step, jnp.int32(0))

    def start(self, gmem: Any) -> Any:
        """(group, its first row) of the first group."""
        del gmem
        return jnp.int32(0), jnp.int32(0)

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Facts of a tile and the place of its group.

        Facts: steps, group, first row of x, its end, row and column of the result. Beyond the last
        tile the group is one that there is not.
        """
        per_group = self.grid[0] * self.grid[1]
        group = lax.div(index, jnp.int32(per_group))
        group = jnp.where(group < self.num_groups, group, self.num_groups + 1)

        def following(place):
            return place[0] + 1, place[1] + self.size(gmem, *place)

        def is_before(place):
            return place[0] < jnp.minimum(group, self.num_groups)

        place = lax.while_loop(is_before, following, place)
        first = place[1]
        end = first + jnp.where(group < self.num_groups, self.size(gmem, group, first), 0)
        inside = lax.rem(index, jnp.int32(per_group))
        m, n = plgpu.planar_snake(inside, self.grid, self.c.across, self.c.band)
        read = end - first + lax.rem(first, ROW_MULTIPLE)
        steps = jnp.where(end > first, lax.div(read + BLOCK_DEPTH - 1, BLOCK_DEPTH), 0)
        facts = steps, group, first, end, m * BLOCK_ROWS, n * self.c.columns
        return facts, place

    def first_read(self, first: jax.Array) -> jax.Array:
        """The row that the group's first step begins with."""
        return first - lax.rem(first, ROW_MULTIPLE)

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Fills the ring with the operands of one tile."""
        steps, _, first, _, row, column = facts
        first = self.first_read(first)
        x_columns = pl.ds(pl.multiple_of(row, BLOCK_ROWS), BLOCK_ROWS)
        d_columns = pl.ds(pl.multiple_of(column, WIDTH_MULTIPLE), self.c.columns)

        def step(i, _):
            slot = self.slot(done + i)
            full = smem.full.at[slot]
            depths = pl.ds(pl.multiple_of(first + i * BLOCK_DEPTH, ROW_MULTIPLE), BLOCK_DEPTH)
            plgpu.barrier_wait(smem.empty.at[slot])
            plgpu.copy_gmem_to_smem(gmem.x.at[depths, x_columns], smem.a.at[slot], full)
            plgpu.copy_gmem_to_smem(gmem.d.at[depths, d_columns], smem.b.at[slot], full)

        lax.fori_loop(0, steps, step, None)

    def compute(
        self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: jax.Array
    ) -> None:
        """This warpgroup's rows of one tile."""
        _, group, _, _, row, column, *_ = facts

        @pl.when(group < self.num_groups)
        def _():
            value = self.multiply(smem, wg, facts, done, constants)
            parts = []
            for j in range(0, self.c.columns, self.line):

                def place(offset, size, j=j):
                    first = pl.multiple_of(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS) + offset
                    columns = pl.ds(pl.multiple_of(column + j, self.line), self.line)
                    return gmem.out.at[group, pl.ds(first, size), columns]

                part = lax.slice(value, (0, j), (WARPGROUP_ROWS, j + self.line))
                parts.append((part, place, True))
            self.store_whole(smem, wg, parts)

    def multiply(self, smem: Any, wg: Any, facts: Any, done: Any, last_end: jax.Array) -> jax.Array:
        """fp32 [64, columns]."""
        mine = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)
        num_steps, _, first, end, *_ = facts
        first_read = self.first_read(first)
        # Rows of no group may be NaN in both operands; of another group they count on its own.
        is_last_group = end == last_end

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
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[self.slot(done + k - 1)]))

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
