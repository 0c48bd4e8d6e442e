"""Grouped products on a Hopper GPU: rows times their group's weight, and the gated pair.

A block stays on its multiprocessor and takes tiles of 128 rows of one group from a list; a
warpgroup copies tiles of operands ahead, two multiply 64 rows each, and one without rows, at a
group's end, does not. Results leave while the next tile is multiplied.

Dims: M row, G group, K contraction, N column.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E

from .config import (
    BLOCK_DEPTH,
    BLOCK_ROWS,
    ROW_MULTIPLE,
    WARPGROUP_ROWS,
    WIDTH_MULTIPLE,
    GroupedConfig,
)
from .ring import RingKernel
from .rows import copy_rows


def grouped_product(
    factors: list[tuple[jax.Array, list[jax.Array]]],
    group_sizes_G: jax.Array,
    *,
    transposed: bool,
    gated: bool = False,
    keep: bool = False,
    rows_M: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: GroupedConfig,
) -> list[jax.Array]:
    """Sums over factors of rows times their group's weight: [M, N] of each weight of a factor.

    Args:
        factors: (a [M, K], weights [G, K, N]); all have as many weights. M is a multiple of 8 and
            at least 128, K and N are multiples of 64.
        group_sizes_G: int32, in sum at most M; rows beyond are 0.
        transposed: weights are [G, N, K].
        gated: of two weights, silu(first) * second takes the place of the products.
        keep: and the products follow it.
        rows_M: int32; row m is row ``rows_M[m]`` of the only a, which then has any number of rows.
        out_dtype: of all results.
        config: tiles.
    """
    a_MK, weights = factors[0]
    num_groups, num_columns = weights[0].shape[0], weights[0].shape[1 if transposed else 2]
    num_rows = a_MK.shape[0] if rows_M is None else rows_M.shape[0]
    kernel = _Product(
        c=config,
        dtype=a_MK.dtype,
        out_dtype=jnp.dtype(out_dtype),
        num_rows=num_rows,
        num_groups=num_groups,
        depths=tuple(a.shape[1] for a, _ in factors),
        num_weights=len(weights),
        num_columns=num_columns,
        transposed=transposed,
        gated=gated,
        keep=keep,
        gathered=rows_M is not None,
    )
    operands = {
        "sizes": group_sizes_G,
        "a": [a for a, _ in factors],
        "b": [w for _, weights in factors for w in weights],
    }
    if rows_M is not None:
        # The last tile names rows beyond the last.
        operands["rows"] = jnp.pad(rows_M, (0, BLOCK_ROWS))
    result = jax.ShapeDtypeStruct((num_rows, num_columns), out_dtype)
    return list(kernel.launch(operands, {"out": [result] * kernel.num_results})["out"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Product(RingKernel):
    """The kernel of one call; methods are its phases, written once per trace."""

    depths: tuple[int, ...]
    num_weights: int
    num_columns: int
    transposed: bool
    gated: bool
    keep: bool
    gathered: bool

    @property
    def block_columns(self) -> int:
        """Of one weight."""
        return self.c.columns // self.num_weights

    @property
    def num_results(self) -> int:
        if self.gated:
            return 1 + self.keep * self.num_weights
        return self.num_weights

    @property
    def num_steps(self) -> int:
        """Of a tile."""
        return sum(-(-depth // BLOCK_DEPTH) for depth in self.depths)

    def scratch(self) -> dict[str, Any]:
        b = (BLOCK_DEPTH, self.block_columns)
        b = b[::-1] if self.transposed else b
        return self.shared(
            a=(BLOCK_ROWS, BLOCK_DEPTH), **{f"b{i}": b for i in range(self.num_weights)}
        )

    @property
    def num_n_tiles(self) -> int:
        return -(-self.num_columns // self.block_columns)

    def constants(self, gmem: Any) -> None:
        """Nothing but the facts of a tile is needed."""

    def start(self, gmem: Any) -> Any:
        """(group, its first row, its rows, tiles before it) of the first group."""
        zero = jnp.int32(0)
        return zero, zero, self.size(gmem, zero, zero), zero

    def row_tiles(self, first: jax.Array, size: jax.Array) -> jax.Array:
        """Tiles of rows of a group."""
        count = lax.div(lax.rem(first, ROW_MULTIPLE) + size + BLOCK_ROWS - 1, BLOCK_ROWS)
        return jnp.where(size > 0, count, 0)

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Facts of a tile and the place of its group, which is not before the last one's.

        Facts: steps, group, first row read, first row written, end of rows written, column. Rows of
        no group are those of a group number G, without steps; beyond them there are no rows.
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
            self.c.across,
            self.c.band,
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

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Fills the ring with the operands of one tile."""
        steps, group, row, _, _, column = facts
        tile_rows = pl.ds(pl.multiple_of(row, ROW_MULTIPLE), BLOCK_ROWS)
        columns = pl.ds(pl.multiple_of(column, WIDTH_MULTIPLE), self.block_columns)

        @pl.when(steps > 0)
        def _():
            before = done
            for f, depth in enumerate(self.depths):
                weights = gmem.b[f * self.num_weights : (f + 1) * self.num_weights]

                def copy(k, slot, full, f=f, weights=weights, depth=depth):
                    depths = pl.ds(pl.multiple_of(k * BLOCK_DEPTH, BLOCK_DEPTH), BLOCK_DEPTH)
                    for i, w in enumerate(weights):
                        part = (columns, depths) if self.transposed else (depths, columns)
                        plgpu.copy_gmem_to_smem(
                            w.at[(group, *part)], self.b_smem(smem, i).at[slot], full
                        )
                    if self.gathered:
                        copy_rows(
                            gmem.a[f].at[:, depths], gmem.rows.at[tile_rows], smem.a.at[slot],
                            row_bytes=depth * self.dtype.itemsize,
                        )  # fmt: skip
                    else:
                        a_gmem = gmem.a[f].at[tile_rows, depths]
                        plgpu.copy_gmem_to_smem(a_gmem, smem.a.at[slot], full)

                num_steps = -(-depth // BLOCK_DEPTH)
                self.fill(smem, num_steps, before, copy, gathered=self.gathered)
                before = before + num_steps

    def b_smem(self, smem: Any, i: int) -> Any:
        """The ring of weight i."""
        return getattr(smem, f"b{i}")

    def compute(
        self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: None
    ) -> None:
        """This warpgroup's rows of one tile."""
        del constants
        steps, _, row, first, end, column, *_ = facts
        row = pl.multiple_of(row + wg * WARPGROUP_ROWS, ROW_MULTIPLE)
        first, end = (jnp.clip(x - row, 0, WARPGROUP_ROWS) for x in (first, end))
        has_rows, is_of_group = first < end, steps > 0

        def store(results):
            parts = []
            for value, out_gmem in zip(results, gmem.out, strict=True):
                for j in range(0, self.block_columns, self.line):

                    def at(offset, size, out_gmem=out_gmem, j=j):
                        columns = pl.ds(pl.multiple_of(column + j, self.line), self.line)
                        return out_gmem.at[pl.ds(row + offset, size), columns]

                    part = lax.slice(value, (0, j), (WARPGROUP_ROWS, j + self.line))
                    parts.append((part, at, column + j < self.num_columns))
            self.store(smem, wg, parts, (first, end))

        @pl.when(is_of_group & has_rows)
        def _():
            store(self.results(self.multiply(smem, wg, done)))

        @pl.when(is_of_group & jnp.logical_not(has_rows))
        def _():
            def step(k, _):
                slot = self.slot(done + k)
                plgpu.barrier_wait(smem.full.at[slot])
                plgpu.barrier_arrive(smem.empty.at[slot])

            lax.fori_loop(0, self.num_steps, step, None)

        @pl.when(jnp.logical_not(is_of_group) & has_rows)
        def _():
            zeros = plgpu.layout_cast(
                jnp.zeros((WARPGROUP_ROWS, self.block_columns), jnp.float32), plgpu.Layout.WGMMA
            )
            store([zeros] * self.num_results)

    def multiply(self, smem: Any, wg: Any, done: Any) -> Any:
        """fp32 [64, columns] of each weight."""
        mine = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

        def product(*accs):
            def step(k, _):
                slot = self.slot(done + k)
                plgpu.barrier_wait(smem.full.at[slot])
                for i, acc in enumerate(accs):
                    b = self.b_smem(smem, i).at[slot]
                    b = b.transpose((1, 0)) if self.transposed else b
                    plgpu.wgmma(acc, smem.a.at[slot, mine], b)
                plgpu.wgmma_wait(len(accs))
                # The step before this one is multiplied.
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[self.slot(done + k - 1)]))

            lax.fori_loop(0, self.num_steps, step, None)
            values = tuple(acc[...] for acc in accs)
            plgpu.barrier_arrive(smem.empty.at[self.slot(done + self.num_steps - 1)])
            return values

        acc = plgpu.ACC((WARPGROUP_ROWS, self.block_columns), jnp.float32)
        return pl.run_scoped(product, *[acc] * self.num_weights)

    def results(self, products: Any) -> list[jax.Array]:
        """What leaves, in fp32."""
        if not self.gated:
            return list(products)
        gate, up = products
        out = gate * up / (1.0 + jnp.exp2(gate * -LOG2E))
        return [out, gate, up] if self.keep else [out]
