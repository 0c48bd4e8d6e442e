"""``flat`` for the interpreter, which knows Pallas's own copies and barriers alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .flat import Columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InterpretedCopies:
    """Fields and methods as of ``FlatCopies``.

    Arrays go on behind their last row for as long as a row is padded to: full pieces are loaded,
    with what belongs to neighbors, and cut-off ones stored.
    """

    num_rows: int
    columns: int
    piece: int
    itemsize: int
    by_warps: bool

    def wait(self, barrier: Any, turn: Any) -> None:
        del turn
        plgpu.barrier_wait(barrier)

    def load(
        self, arrays: Sequence[Any], slots: Sequence[Any], barrier: Any, *, row: Any,
        columns: Columns, wanted: Any,
    ) -> None:  # fmt: skip
        @pl.when(wanted)
        def _():
            for k, at, warp in self._pieces(columns):
                start = jnp.minimum(row + warp, self.num_rows - 1) * self.columns + at
                for x, slot in zip(arrays, slots, strict=True):
                    part = slot.at[pl.ds(k * self.piece, self.piece)]
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(start, self.piece)], part, barrier)

    def store(
        self, slots: Sequence[Any], arrays: Sequence[Any], *, row: Any, columns: Columns
    ) -> None:
        for k, at, warp in self._pieces(columns):
            start = (row + warp) * self.columns + at
            for size in (self.piece, self.columns % self.piece):
                left = self.columns - at
                fits = (left >= size) if size == self.piece else (left == size)

                def store(k=k, start=start, size=size):
                    for slot, x in zip(slots, arrays, strict=True):
                        part = slot.at[pl.ds(k * self.piece, size)]
                        plgpu.copy_smem_to_gmem(
                            part, x.at[pl.ds(start, size)], commit_group=False
                        )

                if size:
                    pl.when(fits & (row + warp < self.num_rows))(store)
        plgpu.commit_smem_to_gmem_group()

    def _pieces(self, columns: Columns) -> list[tuple[int, Any, int]]:
        """Of each piece: its number in a slot, its column, its warp."""
        each = columns if isinstance(columns, tuple) else (columns,)
        if not self.by_warps:
            return [(k, at, 0) for k, at in enumerate(each)]
        return [(k * WARPS + warp, at, warp) for k, at in enumerate(each) for warp in range(WARPS)]
