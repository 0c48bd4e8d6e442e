"""Tiles of rows of a single group: finding them from the group sizes, products and stores.

Rows beyond the groups are tiles without steps, which are written as zeros.

Dims: M row, G group, N column.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.product import no_sum

from .config import BAND, BLOCK_ROWS, ROW_MULTIPLE, WARPGROUP_ROWS
from .ring import RingKernel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowTilesKernel(RingKernel):
    """A kernel that multiplies rows by their group's weight; subclasses define a tile's product."""

    num_columns: int

    @property
    @abc.abstractmethod
    def block_columns(self) -> int:
        """Number of columns of one result in a tile."""

    @property
    @abc.abstractmethod
    def num_results(self) -> int:
        """Number of result arrays, all of one shape."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """Number of steps along K in a tile."""

    @abc.abstractmethod
    def multiplied(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any) -> list[jax.Array]:
        """Multiplies this warpgroup's rows of one tile: fp32 [64, block columns] per result."""

    def pass_by(self, smem: Any, wg: Any, slot: jax.Array) -> None:
        """Skips a step of a tile in which this warpgroup has no rows."""
        del wg
        plgpu.barrier_wait(smem.full.at[slot])
        plgpu.barrier_arrive(smem.empty.at[slot])

    @property
    def num_n_tiles(self) -> int:
        """Number of tiles along the columns."""
        return -(-self.num_columns // self.block_columns)

    def start(self, gmem: Any) -> Any:
        """Returns the state ``find`` starts at: (group, first row, its rows, tiles before it)."""
        zero = jnp.int32(0)
        return zero, zero, self.size(gmem, zero, zero), zero

    def row_tiles(self, first: jax.Array, size: jax.Array) -> jax.Array:
        """Returns the number of row tiles of a group of ``size`` rows that begins at ``first``."""
        count = lax.div(lax.rem(first, ROW_MULTIPLE) + size + BLOCK_ROWS - 1, BLOCK_ROWS)
        return jnp.where(size > 0, count, 0)

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Finds tile ``index`` by walking the groups, starting at the previous tile's group.

        Returns steps, group, first row read, first row written, end of rows written, column. Rows
        beyond the groups count as group number G, whose tiles have no steps.
        """

        def is_later(place):
            group, first, size, before = place
            end = before + self.row_tiles(first, size) * self.num_n_tiles
            return (index >= end) & (group <= self.num_groups)

        def following(place):
            group, first, size, before = place
            before = before + self.row_tiles(first, size) * self.num_n_tiles
            group, first = group + 1, first + size
            rest = jnp.where(group == self.num_groups, self.num_rows - first, 0)
            is_group = group < self.num_groups
            return group, first, jnp.where(is_group, self.size(gmem, group, first), rest), before

        place = lax.while_loop(is_later, following, place)
        group, first, size, before = place
        m, n = plgpu.planar_snake(
            index - before,
            (jnp.maximum(self.row_tiles(first, size), 1), self.num_n_tiles),
            0,
            BAND,
        )
        row = first - lax.rem(first, ROW_MULTIPLE) + m * BLOCK_ROWS
        facts = (
            jnp.where(group < self.num_groups, self.num_steps, 0),
            group,
            row,
            jnp.maximum(first, row),
            jnp.minimum(first + size, row + BLOCK_ROWS),
            n * self.block_columns,
        )
        return facts, place

    def compute(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: Any) -> None:
        """Multiplies this warpgroup's rows of one tile and stores them."""
        del constants
        steps, _, row, first, end, column, *_ = facts
        row = pl.multiple_of(row + wg * WARPGROUP_ROWS, ROW_MULTIPLE)
        rows = first, end = tuple(jnp.clip(x - row, 0, WARPGROUP_ROWS) for x in (first, end))
        has_rows, is_of_group = first < end, steps > 0

        @pl.when(is_of_group & has_rows)
        def _():
            results = self.multiplied(gmem, smem, wg, facts, done)
            self.send(gmem, smem, wg, results, (row, column), rows)

        @pl.when(is_of_group & jnp.logical_not(has_rows))
        def _():
            def step(k, _):
                self.pass_by(smem, wg, self.slot(done + k))

            lax.fori_loop(0, self.num_steps, step, None)

        @pl.when(jnp.logical_not(is_of_group) & has_rows)
        def _():
            self.send(
                gmem, smem, wg, [no_sum(self.block_columns)] * self.num_results, (row, column), rows
            )

    def send(self, gmem: Any, smem: Any, wg: Any, results: Any, place: Any, rows: Any) -> None:
        """Starts to store a warpgroup's 64 rows of each result, only rows ``rows`` (first, end).

        Args:
            place: row and column in the result of the 64 rows' first element.
        """
        row, column = place
        parts = []
        for value, out_gmem in zip(results, gmem.out, strict=True):
            for j in range(0, value.shape[1], self.line):

                def at(offset, size, out_gmem=out_gmem, j=j):
                    columns = pl.ds(pl.multiple_of(column + j, self.line), self.line)
                    return out_gmem.at[pl.ds(row + offset, size), columns]

                part = lax.slice(value, (0, j), (WARPGROUP_ROWS, j + self.line))
                parts.append((part, at, column + j < self.num_columns))
        self.store(smem, wg, parts, rows)
