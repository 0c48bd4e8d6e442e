"""The kernel of a group's weight gradient on a Hopper GPU: x^T d over the group's rows.

A tile is 128 rows and 256 columns of one group's gradient; its contraction is as long as the group.
Rows are copied 64 at a time, starting at the multiple of 8 before the group. So the first and the
last step contain rows of other groups, which are zeroed in shared memory while the previous step is
multiplied.

Dims: M row, G group, K width of x, N width of d.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import tile_layout

from .config import (
    BAND,
    BLOCK_DEPTH,
    BLOCK_ROWS,
    NUM_COMPUTE,
    ROW_MULTIPLE,
    WARPGROUP_ROWS,
    WIDTH_MULTIPLE,
    GroupedConfig,
)
from .ring import RingKernel, copy_rows

LONG = 4
"""Groups with more rows than this many times the mean are computed first."""
READ_AT_ONCE = 8  # sizes whose loads do not wait for each other


def grouped_weight_gradient(
    x_MK: jax.Array,
    d_MN: jax.Array,
    group_sizes_G: jax.Array,
    *,
    rows_M: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: GroupedConfig,
) -> jax.Array:
    """Computes x^T d over each group's rows: [G, K, N], 0 for a group without rows.

    Args:
        x_MK: M is a multiple of 8 and at least 64; K a multiple of 64 and at least 128.
        d_MN: the cotangent; N is a multiple of 64.
        group_sizes_G: int32, in sum at most M; rows beyond may be NaN.
        rows_M: int32; row m is ``x_MK[rows_M[m]]``. x then has any number of rows and K is a
            multiple of 128.
        out_dtype: dtype of the result; fp32 sums are rounded to it once.
        config: tile sizes.
    """
    num_groups = group_sizes_G.shape[0]
    kernel = _WeightGradient(
        c=config,
        dtype=x_MK.dtype,
        out_dtype=jnp.dtype(out_dtype),
        num_rows=d_MN.shape[0],
        num_groups=num_groups,
        width=x_MK.shape[1],
        num_columns=d_MN.shape[1],
        gathered=rows_M is not None,
    )
    operands = {"sizes": group_sizes_G, "x": x_MK, "d": d_MN}
    if rows_M is not None:
        assert x_MK.shape[1] % BLOCK_ROWS == 0, x_MK.shape
        # The last step names rows beyond the last.
        operands["rows"] = jnp.pad(rows_M, (0, BLOCK_DEPTH))
    result = jax.ShapeDtypeStruct((num_groups, kernel.width, kernel.num_columns), out_dtype)
    return kernel.launch(operands, {"out": result})["out"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _WeightGradient(RingKernel):
    """The kernel of one call."""

    name: ClassVar[str] = "grouped_matmul_weight_gradient"

    width: int
    num_columns: int
    gathered: bool

    def scratch(self) -> dict[str, Any]:
        ring = self.shared(a=(BLOCK_DEPTH, BLOCK_ROWS), b=(BLOCK_DEPTH, self.c.columns))
        return {**ring, "masked": plgpu.Barrier(num_arrivals=NUM_COMPUTE)}

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of tiles of one group's gradient, along rows and columns."""
        return -(-self.width // BLOCK_ROWS), -(-self.num_columns // self.c.columns)

    def begin(self, gmem: Any, smem: Any, wg: Any) -> jax.Array:
        """Finds the row at which the last group ends."""
        del smem, wg

        def step(i, end):
            for j in range(READ_AT_ONCE):
                group = i * READ_AT_ONCE + j
                end += jnp.where(group < self.num_groups, self.size(gmem, group, end), 0)
            return end

        return lax.fori_loop(0, -(-self.num_groups // READ_AT_ONCE), step, jnp.int32(0))

    @property
    def long(self) -> int:
        """Number of rows beyond which a group counts as long."""
        return LONG * -(-self.num_rows // self.num_groups)

    def start(self, gmem: Any) -> Any:
        """Returns the first state: (long or other, group, first row, rows, groups before)."""

        def step(i, longest):
            for j in range(READ_AT_ONCE):
                group = jnp.minimum(i * READ_AT_ONCE + j, self.num_groups - 1)
                longest = jnp.maximum(longest, gmem.sizes[group])
            return longest

        zero = jnp.int32(0)
        longest = lax.fori_loop(0, -(-self.num_groups // READ_AT_ONCE), step, zero)
        turn = jnp.where(longest > self.long, 0, 1)
        return turn, zero, zero, self.size(gmem, zero, zero), zero

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Finds tile ``index``, and returns its facts and its group's search state.

        Groups much longer than the mean come first: their tiles take longest, and one that is begun
        last would keep all others waiting.

        Facts: steps, group, first row of x, its end, row and column of the result. Behind the last
        tile, the group's number is above the last group's.
        """
        per_group = self.grid[0] * self.grid[1]
        wanted = lax.div(index, jnp.int32(per_group))

        def is_counted(place):
            turn, _, _, size, _ = place
            return (size > self.long) == (turn == 0)

        def is_elsewhere(place):
            found = is_counted(place) & (place[4] == wanted)
            return jnp.logical_not(found) & (place[0] < 2)

        def following(place):
            turn, group, first, size, before = place
            before = before + is_counted(place).astype(jnp.int32)
            is_last = group == self.num_groups - 1
            turn = turn + is_last.astype(jnp.int32)
            group = jnp.where(is_last, 0, group + 1)
            first = jnp.where(is_last, 0, first + size)
            return turn, group, first, self.size(gmem, group, first), before

        place = lax.while_loop(is_elsewhere, following, place)
        turn, group, first, size, _ = place
        exists = turn < 2
        group = jnp.where(exists, group, self.num_groups + 1)
        end = first + jnp.where(exists, size, 0)
        inside = lax.rem(index, jnp.int32(per_group))
        m, n = plgpu.planar_snake(inside, self.grid, 0, BAND)
        read = end - first + lax.rem(first, ROW_MULTIPLE)
        steps = jnp.where(end > first, lax.div(read + BLOCK_DEPTH - 1, BLOCK_DEPTH), 0)
        facts = steps, group, first, end, m * BLOCK_ROWS, n * self.c.columns
        return facts, place

    def first_read(self, first: jax.Array) -> jax.Array:
        """Returns the row at which the group's first step begins to read."""
        return first - lax.rem(first, ROW_MULTIPLE)

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Loads the operands of one tile into the ring."""
        steps, _, first, _, row, column = facts
        first = self.first_read(first)
        x_columns = pl.ds(pl.multiple_of(row, BLOCK_ROWS), BLOCK_ROWS)
        d_columns = pl.ds(pl.multiple_of(column, WIDTH_MULTIPLE), self.c.columns)

        def copy(i, slot, full):
            depths = pl.ds(pl.multiple_of(first + i * BLOCK_DEPTH, ROW_MULTIPLE), BLOCK_DEPTH)
            plgpu.copy_gmem_to_smem(gmem.d.at[depths, d_columns], smem.b.at[slot], full)
            if self.gathered:
                copy_rows(
                    gmem.x.at[:, x_columns], gmem.rows.at[depths], smem.a.at[slot],
                    row_bytes=self.width * self.dtype.itemsize,
                )  # fmt: skip
            else:
                plgpu.copy_gmem_to_smem(gmem.x.at[depths, x_columns], smem.a.at[slot], full)

        self.fill(smem, steps, done, copy, gathered=self.gathered)

    def compute(
        self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: jax.Array
    ) -> None:
        """Computes this warpgroup's rows of one tile and stores them."""
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
        """Multiplies this warpgroup's rows of a tile over the group's rows: fp32 [64, columns]."""
        mine = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)
        num_steps, _, first, end, *_ = facts
        first_read = self.first_read(first)

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

                # Rows of no group may be NaN in both operands; a factor of 0 does not silence it.
                @pl.when(row + BLOCK_DEPTH > last_end)
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
        tile = plgpu.load(ref, layout=tile_layout(), optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=tile_layout())
        is_kept = (row >= kept[0]) & (row < kept[1])
        ref[...] = jnp.where(is_kept, tile, jnp.zeros((), tile.dtype))
        plgpu.commit_smem()
