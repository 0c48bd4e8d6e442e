"""Packs the inputs of a call's rows into one array, as each array costs a transfer of its own.

Dims: B row, T new token, M page of a row, C column of the packed array, S slot.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxinfra.serving.engine.plan import PlannedRow, SchedulerLimits
from jaxinfra.serving.engine.requests import RequestStream
from jaxinfra.serving.sampling import SamplingRows

_OF_REQUEST = (
    "slot",  # one beyond the last marks padding
    "seed",  # the request's ``seed_bits``, reinterpreted
    "choice",  # tells apart requests with equal prompt and seed
    "adapter",  # number in the adapter bank; 0: none
)
_OF_STEP = (
    "start",  # position of the row's first token
    "count",  # its new tokens
    "context",  # tokens of its request so far, prompt included
    "key_position",  # of its first sampled token, from which the PRNG key is derived
    "is_sampled",  # 1: it samples a token that the engine uses; chunks in a prompt's middle do not
    "state",  # slot of the states before its first token
)
FIELDS = (
    *_OF_REQUEST,
    *_OF_STEP,
    "is_masked",  # 1: its sampled token is limited by the token mask in its slot
    "is_counted",  # 1: its input token is yet to be counted in its slot's token history
)
"""Numbers of each row, in the order of the packed array's columns."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """Inputs of a call's rows as one packed int32 array, to be unpacked inside jit."""

    numbers_BC: Int[Array, "B C"] | np.ndarray  # int32: fields, pages (0: none), token ids
    sampling: SamplingRows
    length: int = dataclasses.field(metadata=dict(static=True))  # tokens of a row

    def field(self, name: str) -> Int[Array, "B"]:
        """Returns one of the ``FIELDS`` of each row, int32."""
        return jnp.asarray(self.numbers_BC)[:, FIELDS.index(name)]

    @property
    def ids_BT(self) -> Int[Array, "B T"] | np.ndarray:
        """The token ids, int32; an id below 0 stands for the token last sampled in its slot."""
        return self.numbers_BC[:, -self.length :]

    @property
    def positions_BT(self) -> Int[Array, "B T"]:
        """The position of each token, int32; below 0 for padding."""
        offsets_1T = jnp.arange(self.length)[None]
        positions_BT = self.field("start")[:, None] + offsets_1T
        return jnp.where(offsets_1T < self.field("count")[:, None], positions_BT, -1)

    @property
    def tables_BM(self) -> Int[Array, "B M"] | np.ndarray:
        """The page table, int32: the page numbers of each row, filled up with 0."""
        return self.numbers_BC[:, len(FIELDS) : -self.length]


@final
class RowWriter:
    """Packs planned rows into one int32 array. Fields that rarely change are cached per slot.

    Args:
        adapters: names of the adapters in the model's bank, which requests refer to.
    """

    def __init__(self, limits: SchedulerLimits, adapters: Sequence[str] = ()):
        self._padding = limits.max_running
        # Numbers in the bank by the names that requests have.
        self.adapters = {name: place for place, name in enumerate((None, *adapters))}
        width = len(FIELDS) + limits.table_width
        self._kept_SC = np.zeros((limits.max_running + 1, width), np.int32)
        self._kept_SC[self._padding, 0] = self._padding
        self._kept_SC[self._padding, FIELDS.index("state")] = limits.empty_state
        # Of whom it is kept, by slot: a request, and its pages.
        self._known: list[tuple[RequestStream | None, tuple[int, ...]]]
        self._known = [(None, ())] * limits.max_running

    def write(
        self,
        rows: Sequence[PlannedRow],
        *,
        size: int,
        length: int,
        sampling: SamplingRows,
        masks: Mapping[int, np.ndarray] | None = None,
        counted: Sequence[int] = (),
    ) -> RowInputs:
        """Returns the packed inputs of a call: its rows, then padding up to ``size``.

        Args:
            masks: allowed-token masks by slot, for rows whose request has a structure.
            counted: indices of rows whose input token is sampled but not in its slot's history yet.
        """
        numbers_BC = np.zeros((size, self._kept_SC.shape[1] + length), np.int32)
        written = RowInputs(numbers_BC=numbers_BC, sampling=sampling, length=length)
        count, known = len(rows), self._known
        for row in rows:
            stream, pages = known[row.slot]
            if stream is not row.stream or pages != row.pages:
                self._keep(row)
        slots = [row.slot for row in rows] + [self._padding] * (size - count)
        numbers_BC[:, :-length] = self._kept_SC[slots]
        if rows:
            first = len(_OF_REQUEST)
            numbers_BC[:count, first : first + len(_OF_STEP)] = [
                (
                    r.start,
                    r.count,
                    r.context,
                    r.start + r.count - r.num_drafts,
                    r.is_sampled,
                    r.state,
                )
                for r in rows
            ]
            if length == 1:
                numbers_BC[:count, -1] = [row.ids[0] if row.ids else -1 for row in rows]
            else:
                for ids_T, row in zip(numbers_BC[:, -length:], rows, strict=False):
                    ids_T[: len(row.ids) or 1] = row.ids or -1
        if masks:
            is_masked = [row.slot in masks for row in rows]
            numbers_BC[:count, FIELDS.index("is_masked")] = is_masked
        for place in counted:
            numbers_BC[place, FIELDS.index("is_counted")] = True
        return written

    def _keep(self, row: PlannedRow) -> None:
        request, kept_C = row.stream.request, self._kept_SC[row.slot]
        self._known[row.slot] = row.stream, row.pages
        # The seed keeps its bits.
        seed = np.uint32(request.seed_bits).astype(np.int32)
        kept_C[: len(_OF_REQUEST)] = row.slot, seed, request.choice, self.adapters[request.adapter]
        kept_C[len(FIELDS) :] = 0
        kept_C[len(FIELDS) : len(FIELDS) + len(row.pages)] = row.pages
