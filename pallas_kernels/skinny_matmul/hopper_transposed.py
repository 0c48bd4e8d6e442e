"""The transposed product, for rows that the weight's columns are too few for.

Tensor cores read both operands out of shared memory, the left one 64 rows at a time: 64 columns of
a tile by 64 rows of x take as long to read as to multiply, and what the copy engine writes comes on
top. Here 64 columns of the weight are the left operand and half of all rows the right one.

Dims: N column of the weight, M row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .config import ROWS, TRANSPOSED_WARPGROUPS
from .hopper_kernel import SkinnyKernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransposedKernel(SkinnyKernel):
    """A warpgroup has half of the rows, and 64 columns of a tile in each accumulator."""

    @property
    def rows_each(self) -> int:
        """Of a warpgroup."""
        return self.M // TRANSPOSED_WARPGROUPS

    @property
    def strips(self) -> range:
        """First columns of a piece's accumulators."""
        return range(0, self.part_n, ROWS)

    def accumulators(self) -> list[Any]:
        """[N, M] each."""
        acc = plgpu.ACC((ROWS, self.rows_each), jnp.float32)
        return [acc] * (self.parts * len(self.strips))

    def issue(self, smem, slot, group: int, accs: Sequence[Any]) -> None:
        """Products of a tile, each in a group of its own."""
        x_KM = smem.x.at[slot, pl.ds(group * self.rows_each, self.rows_each)].transpose((1, 0))
        places = [(part, first) for part in range(self.parts) for first in self.strips]
        for acc, (part, first) in zip(accs, places, strict=True):
            w_KN = smem.w.at[slot, part, :, pl.ds(first, ROWS)]
            plgpu.wgmma(acc, w_KN.transpose((1, 0)), x_KM)

    def staged_results(self, rows: int) -> dict[str, Any]:
        """None of parts of K: a thread has two columns of 32 bits, and four fill a sector."""
        return {} if self.c.splits > 1 else super().staged_results(rows)

    def leave(self, gmem, smem, block, group: int, results: Sequence[jax.Array]) -> None:
        """Writes half of the rows of the block's columns."""
        rows = pl.ds(group * self.rows_each, self.rows_each)
        for first, result_NM in zip(self.strips, results, strict=True):
            if self.c.splits > 1:
                columns = pl.ds(block * self.part_n + first, ROWS)
                there = self.part_of(gmem.out).at[rows, columns].transpose((1, 0))
                write_registers(turned(result_NM), there)
            else:
                there = smem.out.at[rows, pl.ds(first, ROWS)].transpose((1, 0))
                there[...] = turned(result_NM.astype(self.dtype))
        if self.c.splits == 1:
            plgpu.commit_smem()
            columns = pl.ds(block * self.part_n, self.part_n)
            plgpu.copy_smem_to_gmem(smem.out.at[rows], gmem.out.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)


def turned(tile: jax.Array) -> jax.Array:
    """The same tile, whose threads have neighbors of one column: they are stored transposed."""
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
