"""Held-out windows in which every token of every document counts exactly once."""

import bisect
import dataclasses
from collections.abc import Iterator
from typing import final

import numpy as np

from jaxinfra.core.errors import DataError
from jaxinfra.data.batch import Batch
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.train_iterator import process_rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Chunks:
    """Pieces of documents: ``length`` inputs from ``start``, of which ``context`` do not count."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray
    row: np.ndarray
    column: np.ndarray

    def select(self, index: np.ndarray) -> "_Chunks":
        fields = dataclasses.fields(self)
        return _Chunks(**{field.name: getattr(self, field.name)[index] for field in fields})


def heldout_batches(
    arrays: TokenArrays,
    *,
    sequence_length: int,
    batch_size: int,
    stride: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> "HeldoutBatches":
    """Batches for a held-out loss over exactly the tokens of ``arrays``.

    A document longer than ``sequence_length`` is read in windows that advance by ``stride``
    (default: half a window), each after the first with ``sequence_length - stride`` tokens of
    context that do not count. Documents and ends of documents share rows as segments. The
    separator before a document is given, the one after it is not predicted: the sum of weights is
    ``arrays.num_counted``, and bits per byte divide by ``arrays.num_bytes``.
    """
    stride = max(1, sequence_length // 2) if stride is None else stride
    if not 1 <= stride <= sequence_length:
        raise DataError(
            f"stride={stride} must lie between 1 and sequence_length={sequence_length}: windows "
            "that advance further would skip tokens"
        )
    return HeldoutBatches(
        arrays,
        _pack(arrays, sequence_length, stride),
        sequence_length=sequence_length,
        batch_size=batch_size,
        rows=process_rows(
            batch_size=batch_size, process_index=process_index, process_count=process_count
        ),
    )


@final
class HeldoutBatches:
    """A sequence of batches of equal shape; the last is filled up with rows of weight 0."""

    def __init__(
        self,
        arrays: TokenArrays,
        chunks: _Chunks,
        *,
        sequence_length: int,
        batch_size: int,
        rows: slice,
    ):
        self._arrays = arrays
        self._chunks = chunks
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._rows = rows
        self._num_rows = int(chunks.row[-1]) + 1 if len(chunks.row) else 0

    def __len__(self) -> int:
        return -(-self._num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch[np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch[np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first_row = index * self._batch_size + self._rows.start
        num_rows = self._rows.stop - self._rows.start
        found = np.searchsorted(self._chunks.row, [first_row, first_row + num_rows])
        chunks = self._chunks.select(np.arange(*found))
        return self._batch(chunks, first_row, num_rows)

    def _batch(self, chunks: _Chunks, first_row: int, num_rows: int) -> Batch[np.ndarray]:
        arrays = self._arrays
        shape = (num_rows, self._sequence_length)
        tokens = np.full(shape, arrays.eos_id, np.int32)
        targets = np.full(shape, arrays.eos_id, np.int32)
        segment_ids = np.full(shape, -1, np.int32)
        positions = np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)

        # One entry per input token of the chunks, chunk after chunk.
        which = np.repeat(np.arange(len(chunks.row)), chunks.length)
        position = np.arange(len(which)) - (np.cumsum(chunks.length) - chunks.length)[which]
        offset = chunks.start[which] + position  # of the target within its document
        target = arrays.starts[chunks.document[which]] + offset
        cell = (chunks.row[which] - first_row, chunks.column[which] + position)
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
        return Batch(
            tokens=tokens,
            targets=targets,
            segment_ids=segment_ids,
            positions=positions,
            weights=weights,
        )


def _pack(arrays: TokenArrays, length: int, stride: int) -> _Chunks:
    """Cuts the documents into chunks and gives each a place, sorted by row and column."""
    num_chunks = np.where(
        arrays.lengths > 0, 1 + -(-np.maximum(arrays.lengths - length, 0) // stride), 0
    )
    document = np.repeat(np.arange(arrays.num_documents), num_chunks)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    start = nth * stride
    chunk_length = np.minimum(length, arrays.lengths[document] - start)
    row, column = _best_fit(chunk_length, length)
    chunks = _Chunks(
        document=document,
        start=start,
        length=chunk_length,
        context=np.where(nth == 0, 0, length - stride),
        row=row,
        column=column,
    )
    return chunks.select(np.lexsort((column, row)))


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest first, each into the fullest row that still holds it."""
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
        if left > need:
            bisect.insort(free, (left - need, int(row[index])))
    return row, column
