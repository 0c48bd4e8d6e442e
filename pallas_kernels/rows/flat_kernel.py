"""What a ``flat`` kernel is made for: how its arrays lie, and who copies parts of them."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.machine import WARPS

from .config import Flat
from .flat_copies import FlatCopies
from .flat_interpreted import InterpretedCopies
from .flat_order import Order
from .formula import Formula


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlatKernel:
    """A formula, its tiles and the rows of one call."""

    f: Formula
    c: Flat
    order: Order
    columns: int
    dtype: jnp.dtype
    unit: int  # elements, of which rows' shifts are fewer

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of what belongs to the columns of a row, padded."""
        c = self.c
        if c.by_warps:
            return 1, 1, c.chunks, c.tile
        return c.cluster, c.group, c.chunks, WARPS, c.tile

    def shifted(self, x_C: jax.Array) -> jax.Array:
        """A vector as it lies behind the shift of each row of a period."""
        shifts = [row * self.columns % self.unit for row in range(self.order.period)]
        behind = self.c.columns - self.columns
        return jnp.stack([jnp.pad(x_C, (s, behind - s)).reshape(self.row_shape) for s in shifts])

    def sure(self, chunk: int) -> int:
        """Elements of a chunk that are not behind a row's end, of any warpgroup and row."""
        c = self.c
        last = (c.cluster * c.members - 1) * c.chunks + chunk  # the first to be cut off
        return max(0, min(c.piece, self.columns - last * c.piece))

    def whole(self, chunk: int) -> bool:
        """Whether all elements of a chunk are the row's, of any warpgroup and row."""
        begins = self.columns % self.unit > 0 and chunk == 0
        return self.sure(chunk) == self.c.piece and not begins

    @property
    def copies(self) -> FlatCopies | InterpretedCopies:
        """What copies pieces."""
        c = self.c
        fields = {
            "num_rows": self.order.num_rows, "columns": self.columns, "piece": c.piece,
            "itemsize": self.dtype.itemsize, "by_warps": c.by_warps, "unit": self.unit,
            "spacing": self.order.period,
        }  # fmt: skip
        if c.interpretable:
            return InterpretedCopies(**fields, width=c.columns)
        return FlatCopies(**fields)

    @property
    def sums(self) -> FlatCopies | InterpretedCopies:
        """Of what teams have summed, a row each, which has the shift of the team's rows."""
        return dataclasses.replace(self.copies, num_rows=self.order.stride)
