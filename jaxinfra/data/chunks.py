"""Pieces of documents, given places in rows, and the batch that such rows make."""

import bisect
import dataclasses
from typing import final

import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.data.token_arrays import TokenArrays


@final
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Chunks:
    """Pieces of documents: ``length`` inputs from ``start``, of which ``context`` do not count."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray
    row: np.ndarray
    column: np.ndarray

    def select(self, index: np.ndarray) -> "Chunks":
        """Some of them, in this order."""
        fields = dataclasses.fields(self)
        return Chunks(**{field.name: getattr(self, field.name)[index] for field in fields})


def chunk_rows(
    arrays: TokenArrays, chunks: Chunks, *, num_rows: int, sequence_length: int
) -> Batch[np.ndarray]:
    """The rows that these chunks make; each chunk is a segment, the rest of a row padding.

    Args:
        chunks: sorted by row and column.
    """
    shape = (num_rows, sequence_length)
    tokens = np.full(shape, arrays.eos_id, np.int32)
    targets = np.full(shape, arrays.eos_id, np.int32)
    segment_ids = np.full(shape, -1, np.int32)
    positions = np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    which, position, target = chunk_targets(arrays, chunks)
    offset = chunks.start[which] + position  # of the target within its document
    cell = (chunks.row[which], chunks.column[which] + position)
    first_of_row = np.searchsorted(chunks.row, chunks.row)
    tokens[cell] = np.where(
        offset == 0, arrays.bos_id, arrays.tokens[np.maximum(target - 1, 0)].astype(np.int32)
    )
    targets[cell] = arrays.tokens[target]
    segment_ids[cell] = (np.arange(len(chunks.row)) - first_of_row)[which]
    positions[cell] = position
    weights[cell] = position >= chunks.context[which]
    if arrays.counted is not None:
        weights[cell] *= arrays.counted[target]
    reference = None
    if arrays.reference is not None:
        reference = np.zeros(shape, np.float32)
        reference[cell] = arrays.reference[target]
    return Batch(
        tokens=tokens,
        targets=targets,
        segment_ids=segment_ids,
        positions=positions,
        weights=weights,
        reference=reference,
    )


def chunk_targets(arrays: TokenArrays, chunks: Chunks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each input token of the chunks, one chunk after another: the number of its chunk, its
    position there, and the index of its target among the tokens of ``arrays``.
    """
    which = np.repeat(np.arange(len(chunks.row)), chunks.length)
    position = np.arange(len(which)) - (np.cumsum(chunks.length) - chunks.length)[which]
    target = arrays.starts[chunks.document[which]] + chunks.start[which] + position
    return which, position, target


def best_fit(
    lengths: np.ndarray, capacity: int, *, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest first, each into the fullest row that still holds it.

    Args:
        most: in a row.
    """
    held: dict[int, int] = {}
    row = np.zeros(len(lengths), np.int64)
    column = np.zeros(len(lengths), np.int64)
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    num_rows = 0
    for index in np.argsort(-lengths, kind="stable"):
        need = int(lengths[index])
        place = bisect.bisect_left(free, (need, -1))
        if place < len(free):
            left, row[index] = free.pop(place)
        else:
            left, row[index] = capacity, num_rows
            num_rows += 1
        column[index] = capacity - left
        held[int(row[index])] = held.get(int(row[index]), 0) + 1
        if left > need and held[int(row[index])] != most:
            bisect.insort(free, (left - need, int(row[index])))
    return row, column
