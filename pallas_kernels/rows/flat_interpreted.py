"""``flat_copies`` for the interpreter, which knows Pallas's own copies and barriers alone.

It stores what a chunk has of neighbors too, of each row into a place of its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InterpretedCopies:
    """Fields and methods as of ``FlatCopies``; arrays are padded by a row's length in chunks."""

    num_rows: int
    columns: int
    piece: int
    itemsize: int
    by_warps: bool
    unit: int
    spacing: int
    width: int  # of a row in chunks

    @property
    def word(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.itemsize

    def wait(self, barrier: Any, turn: Any) -> None:
        """Waits for a slot's copies."""
        del turn
        plgpu.barrier_wait(barrier)

    def load(
        self, arrays: Sequence[Any], slots: Sequence[Any], barrier: Any, *, row: Any, column: Any,
        wanted: Any,
    ) -> None:  # fmt: skip
        """Asks for whole pieces, from a word on, with what is a neighbor's."""

        @pl.when(wanted)
        def _():
            size = self.piece + self.word * (self.unit < self.word)
            for warp in range(WARPS if self.by_warps else 1):
                mine = jnp.minimum(row + warp * self.spacing, self.num_rows - 1)
                begin = mine * self.columns
                start = begin - lax.rem(begin, self.word) + column
                for x, slot in zip(arrays, slots, strict=True):
                    part = slot.at[pl.ds(warp * self.piece, size)]
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(start, size)], part, barrier)

    def read(self, slot: Any, *, row: Any, shape: tuple[int, int]) -> jax.Array:
        """A chunk [A, M], from the row's first unit on."""
        begin = row * self.columns
        behind = lax.rem(begin, self.word) - lax.rem(begin, self.unit)
        start = behind if self.unit < self.word else 0  # of warps, rows differ and units are words
        return slot[pl.ds(start, shape[0] * shape[1])].reshape(shape)

    def write(self, value: Any, array: Any, *, row: Any, column: Any) -> None:
        """A chunk [A, M] to rows of ``width``."""
        if not self.by_warps:
            array[pl.ds(row * self.width + column, WARPS * value.shape[1])] = value.reshape(-1)
            return
        for warp in range(WARPS):
            mine = row + warp * self.spacing

            @pl.when(mine < self.num_rows)
            def _(warp=warp, mine=mine):
                at = pl.ds(mine * self.width + column, value.shape[1])
                array[at] = value[warp]

    def whole(self, array: jax.Array) -> jax.Array:
        """Rows [R, C] of what was written."""
        rows = array.reshape(-1, self.width)
        begin = jnp.arange(len(rows)) * self.columns % self.unit
        return jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, self.columns))(rows, begin)
