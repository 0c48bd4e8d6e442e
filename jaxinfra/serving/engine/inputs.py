"""What the host says of the rows of a call: one array, as each one is a transfer of its own.

Dims: B row, T new token, M page of a row, C column.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from jaxinfra.serving.sampling import SamplingRows


class RowNumbers(NamedTuple):
    """A row's numbers, a column each; a row without tokens is padding."""

    slot: int  # beyond the last slot: padding
    start: int = 0  # position of the first token
    count: int = 0
    context: int = 0  # tokens that the row has come to
    seed: int = 0  # below 2**32
    choice: int = 0
    key_position: int = 0  # tokens before the first draw: tells a request's apart
    draws: bool = False  # the draw counts
    is_masked: bool = False  # the slot's mask holds
    adapter: int = 0  # of the model's bank; 0: none
    is_counted: bool = False  # the token was drawn, and is not in the slot's history yet


_NUM_FIELDS = len(RowNumbers._fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """The rows of a call, and how they draw; properties are of a traced one."""

    numbers_BC: Int[Array, "B C"] | np.ndarray  # int32: fields, pages (0: none), token ids
    sampling: SamplingRows
    length: int = dataclasses.field(metadata=dict(static=True))  # tokens of a row

    @classmethod
    def of(
        cls,
        rows: Sequence[RowNumbers],
        *,
        size: int,
        table_width: int,
        length: int,
        sampling: SamplingRows,
        padding: RowNumbers,
    ) -> "RowInputs":
        """Rows without pages and with ids 0, to be written into ``tables_BM`` and ``ids_BT``."""
        numbers_BC = np.zeros((size, _NUM_FIELDS + table_width + length), np.int32)
        padded = [*rows, *[padding] * (size - len(rows))]
        # Seeds keep their bits.
        numbers_BC[:, :_NUM_FIELDS] = np.array(padded, np.int64).astype(np.int32)
        return cls(numbers_BC=numbers_BC, sampling=sampling, length=length)

    def _field(self, name: str) -> Int[Array, "B"]:
        return jnp.asarray(self.numbers_BC)[:, RowNumbers._fields.index(name)]

    @property
    def ids_BT(self) -> Int[Array, "B T"] | np.ndarray:
        """int32; below 0: what the device drew last for the row's slot."""
        return self.numbers_BC[:, -self.length :]

    @property
    def tables_BM(self) -> Int[Array, "B M"] | np.ndarray:
        """int32, each row's pages; 0 where it has none."""
        return self.numbers_BC[:, _NUM_FIELDS : -self.length]

    @property
    def slots_B(self) -> Int[Array, "B"]:
        """Each row's slot; the fields are those of ``RowNumbers``."""
        return self._field("slot")

    @property
    def starts_B(self) -> Int[Array, "B"]:
        """Positions of the first tokens."""
        return self._field("start")

    @property
    def counts_B(self) -> Int[Array, "B"]:
        """Tokens of each row."""
        return self._field("count")

    @property
    def contexts_B(self) -> Int[Array, "B"]:
        """Tokens that each row has come to."""
        return self._field("context")

    @property
    def seeds_B(self) -> UInt32[Array, "B"]:
        """Lower bits of each request's."""
        return jax.lax.bitcast_convert_type(self._field("seed"), jnp.uint32)

    @property
    def choices_B(self) -> Int[Array, "B"]:
        """Each request's."""
        return self._field("choice")

    @property
    def key_positions_B(self) -> Int[Array, "B"]:
        """Tokens before each row's first draw."""
        return self._field("key_position")

    @property
    def draws_B(self) -> Bool[Array, "B"]:
        """Whether each draw counts."""
        return self._field("draws") != 0

    @property
    def is_masked_B(self) -> Bool[Array, "B"]:
        """Whether each slot's mask holds."""
        return self._field("is_masked") != 0

    @property
    def adapters_B(self) -> Int[Array, "B"]:
        """Each row's; 0: none."""
        return self._field("adapter")

    @property
    def is_counted_B(self) -> Bool[Array, "B"]:
        """Whether each row's token is new to its history."""
        return self._field("is_counted") != 0
