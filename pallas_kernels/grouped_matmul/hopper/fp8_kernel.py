"""Grouped products of 8-bit operands with block scales on a Hopper GPU.

Tiles, ring and stores are those of 16-bit products (``ring``, ``row_tiles``). A step covers 128 of
K, the length of a block of scales. As in ``fp8/hopper_matmul.py``, each step's product is promoted
to an fp32 sum, 64 x 128 at a time, while the other warpgroup multiplies. Scales are loaded from
global memory to registers a step ahead.

Dims: M row, G group, K contraction, N column, J blocks of 128 of K, I blocks of 128 of N.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.scales import BLOCK
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.product import no_sum, product
from pallas_kernels.hopper.tile import row_layout, tiled

from .config import (
    BLOCK_ROWS,
    FP8_DEPTH,
    NUM_COMPUTE,
    ROW_MULTIPLE,
    WARPGROUP_ROWS,
    WIDTH_MULTIPLE,
    ScaledGroupedConfig,
)
from .row_tiles import RowTilesKernel

PART = 128
"""Columns of one product: what is promoted at a time, and one block of scales."""


def scaled_grouped_product(
    a_MK: jax.Array,
    b_GNK: jax.Array,
    a_scale_JM: jax.Array,
    b_scale_GJI: jax.Array,
    group_sizes_G: jax.Array,
    *,
    out_dtype: jnp.dtype,
    config: ScaledGroupedConfig,
    interpretable: bool = False,
) -> jax.Array:
    """Multiplies 8-bit rows by their group's weight: [M, N], 0 beyond the groups.

    Args:
        a_MK: 8-bit rows; M is a multiple of 8 and at least 128, K a multiple of 128.
        b_GNK: the groups' 8-bit weights; N is a multiple of 64.
        a_scale_JM, b_scale_GJI: float32 scales of 1x128 and 128x128 blocks.
        group_sizes_G: int32, rows of each group, in sum at most M.
        out_dtype: dtype of the result; fp32 sums are rounded to it once.
        config: tile sizes.
        interpretable: uses Pallas's own products, which the interpreter can run.
    """
    (M, K), (num_groups, N, _) = a_MK.shape, b_GNK.shape
    kernel = _ScaledProduct(
        c=config,
        dtype=a_MK.dtype,
        b_dtype=b_GNK.dtype,
        out_dtype=jnp.dtype(out_dtype),
        num_rows=M,
        num_groups=num_groups,
        num_columns=N,
        num_steps=K // FP8_DEPTH,
        interpretable=interpretable,
    )
    operands = {
        "sizes": group_sizes_G,
        "a": a_MK,
        "b": b_GNK,
        "a_scale": a_scale_JM,
        "b_scale": b_scale_GJI,
    }
    out = [jax.ShapeDtypeStruct((M, N), out_dtype)]
    return kernel.launch(operands, {"out": out})["out"][0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ScaledProduct(RowTilesKernel):
    """The kernel of one call; methods are its phases, written once per trace."""

    name: ClassVar[str] = "scaled_grouped_matmul"

    c: ScaledGroupedConfig
    b_dtype: jnp.dtype
    num_steps: int
    interpretable: bool

    @property
    def block_columns(self) -> int:
        return self.c.columns

    @property
    def num_results(self) -> int:
        return 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the warpgroups that multiply and of the one that loads."""
        return 240, 24

    @property
    def num_parts(self) -> int:
        """Number of products per warpgroup and step, each with a piece of b that arrives by itself.

        A part then begins with a wait, which ptxas moves no product across: two accumulators at a
        time would not fit in the registers.
        """
        return self.c.columns // PART

    def scratch(self) -> dict[str, Any]:
        c, tile = self.c, tiled(128, itemsize=1)
        a, b = (c.num_stages, BLOCK_ROWS, FP8_DEPTH), (c.num_stages, c.columns, FP8_DEPTH)
        pieces = range(1, self.num_parts)
        return {
            "a": plgpu.SMEM(a, self.dtype, transforms=tile),
            "b": plgpu.SMEM(b, self.b_dtype, transforms=tile),
            **{f"full_{i}": plgpu.Barrier(num_barriers=c.num_stages) for i in pieces},
            "turn": plgpu.Barrier(num_barriers=NUM_COMPUTE),
            **self.barriers(num_copies=2),
        }

    def filled(self, smem: Any) -> list[Any]:
        """Returns the barriers of the pieces of b; the tile of a arrives with the first."""
        return [smem.full, *(getattr(smem, f"full_{i}") for i in range(1, self.num_parts))]

    def begin(self, gmem: Any, smem: Any, wg: Any) -> None:
        """Gives the tensor cores to the first warpgroup."""
        del gmem
        if self.c.in_turns:
            pl.when(wg == 1)(lambda: plgpu.barrier_arrive(smem.turn.at[0]))

    def finish(self, smem: Any, wg: Any) -> None:
        """Waits for the last handover of the tensor cores, which no warpgroup has consumed."""
        if self.c.in_turns:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.turn.at[0]))

    def find(self, gmem: Any, index: jax.Array, place: Any) -> Any:
        """Finds the next tile; no tile reads beyond the last row, where scales end."""
        facts, place = RowTilesKernel.find(self, gmem, index, place)
        steps, group, row, *rest = facts
        return (steps, group, jnp.minimum(row, self.num_rows - BLOCK_ROWS), *rest), place

    def load(self, gmem: Any, smem: Any, facts: Any, done: Any) -> None:
        """Loads the operands of one tile into the ring."""
        steps, group, row, _, _, column = facts
        rows = pl.ds(pl.multiple_of(row, ROW_MULTIPLE), BLOCK_ROWS)

        def copy(k, slot, full):
            depth = pl.ds(pl.multiple_of(k * FP8_DEPTH, FP8_DEPTH), FP8_DEPTH)
            plgpu.copy_gmem_to_smem(gmem.a.at[rows, depth], smem.a.at[slot], full)
            for piece, filled in enumerate(self.filled(smem)):
                first = pl.multiple_of(column + piece * PART, WIDTH_MULTIPLE)
                plgpu.copy_gmem_to_smem(
                    gmem.b.at[group, pl.ds(first, PART), depth],
                    smem.b.at[slot, pl.ds(piece * PART, PART)],
                    filled.at[slot],
                )

        self.fill(smem, steps, done, copy, gathered=False)

    def compute(
        self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, constants: None
    ) -> None:
        """Computes this warpgroup's rows of one tile, or its columns of a short one."""
        steps, _, row, first, end, column, *_ = facts
        if self.num_parts != NUM_COMPUTE:
            RowTilesKernel.compute(self, gmem, smem, wg, facts, done, constants)
            return
        is_short = (steps > 0) & (end - row <= WARPGROUP_ROWS)

        @pl.when(is_short)
        def _():
            mine = pl.multiple_of(wg * PART, PART)
            total = self.sums(gmem, smem, wg, facts, done, row=0, columns=[mine])
            place = pl.multiple_of(row, ROW_MULTIPLE), column + mine
            self.send(gmem, smem, wg, total, place, (first - row, end - row))

        @pl.when(jnp.logical_not(is_short))
        def _():
            RowTilesKernel.compute(self, gmem, smem, wg, facts, done, constants)

    def multiplied(self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any) -> list[jax.Array]:
        columns = list(range(0, self.c.columns, PART))
        row = pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        totals = self.sums(gmem, smem, wg, facts, done, row=row, columns=columns)
        return [jnp.concatenate(totals, axis=1)]

    def sums(
        self, gmem: Any, smem: Any, wg: Any, facts: Any, done: Any, *, row: Any, columns: list[Any]
    ) -> list[jax.Array]:
        """Computes sums of each part, fp32 [64, 128], at the given row and columns of a tile."""
        _, group, tile_row, _, _, column, *_ = facts
        scaled = pl.ds(pl.multiple_of(tile_row + row, ROW_MULTIPLE), WARPGROUP_ROWS)
        rows, parts = pl.ds(row, WARPGROUP_ROWS), [pl.ds(first, PART) for first in columns]
        filled = self.filled(smem)
        first_waits, *waits = [filled] if len(parts) == 1 else [[each] for each in filled]
        last = gmem.b_scale.shape[2] - 1

        def scales_at(k):
            blocks = (jnp.minimum(lax.div(column + first, BLOCK), last) for first in columns)
            of_rows = plgpu.load(gmem.a_scale.at[k, scaled], layout=row_layout(), optimized=False)
            return of_rows, [gmem.b_scale[group, k, i] for i in blocks]

        def step(k, carry):
            totals, (of_rows, of_columns) = carry
            slot = self.slot(done + k)
            # A step ahead: a number from global memory takes as long as a step.
            ahead = scales_at(jnp.minimum(k + 1, self.num_steps - 1))
            for each in first_waits:
                plgpu.barrier_wait(each.at[slot])
            sums = []
            for p, total in enumerate(totals):
                for each in waits[p - 1] if p else ():
                    plgpu.barrier_wait(each.at[slot])
                part = product(
                    smem.a.at[slot, rows], smem.b.at[slot, parts[p]],
                    wg=wg, order_barriers=smem.turn if self.c.in_turns else None,
                    interpretable=self.interpretable,
                )  # fmt: skip
                factor = lax.broadcast_in_dim(of_rows * of_columns[p], part.shape, [0])
                sums.append(total + part * factor)
                if p == len(parts) - 1:
                    plgpu.barrier_arrive(smem.empty.at[slot])
            return sums, ahead

        start = [no_sum(PART) for _ in parts], scales_at(0)
        return lax.fori_loop(0, self.num_steps, step, start)[0]

    def pass_by(self, smem: Any, wg: Any, slot: jax.Array) -> None:
        """Passes a step without rows and hands the tensor cores to the other warpgroup."""
        for filled in self.filled(smem):
            plgpu.barrier_wait(filled.at[slot])
        for _ in range(self.num_parts * self.c.in_turns):
            plgpu.barrier_wait(smem.turn.at[wg])
            plgpu.barrier_arrive(smem.turn.at[1 - wg])
        plgpu.barrier_arrive(smem.empty.at[slot])
