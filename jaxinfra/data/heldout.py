"""Windows of held-out documents, in which every token counts exactly once."""

import dataclasses
from collections.abc import Iterator
from typing import final

import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.data.pieces import DocumentPieces, best_fit, group_indices, piece_rows
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.train_iterator import process_rows
from jaxinfra.errors import DataError


@final
class HeldoutBatches:
    """Sequence of held-out batches, whose loss is over exactly the tokens of ``arrays``.

    Batches have equal shapes; the last is padded with rows of weight 0. A document longer than
    ``sequence_length`` is read in windows that advance by ``stride`` (default: half a window). All
    windows but the first begin with ``sequence_length - stride`` tokens of context that do not
    count. Documents, and last pieces of documents, share rows as segments. The separator before a
    document is an input; the one after it is no target. So the sum of weights is
    ``arrays.num_counted``, and bits per byte are over ``arrays.num_bytes``.
    """

    def __init__(
        self,
        arrays: TokenArrays,
        *,
        sequence_length: int,
        batch_size: int,
        stride: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        stride = max(1, sequence_length // 2) if stride is None else stride
        if not 1 <= stride <= sequence_length:
            raise DataError(
                f"stride={stride} must be between 1 and sequence_length={sequence_length}: windows "
                "that advance further would skip tokens"
            )
        self._arrays = arrays
        self._pieces = pieces = _pack(arrays, sequence_length, stride)
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._rows = process_rows(
            batch_size=batch_size, process_index=process_index, process_count=process_count
        )
        self._num_rows = int(pieces.row[-1]) + 1 if len(pieces.row) else 0

    def __len__(self) -> int:
        return -(-self._num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch[np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Batch[np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first_row = index * self._batch_size + self._rows.start
        num_rows = self._rows.stop - self._rows.start
        found = np.searchsorted(self._pieces.row, [first_row, first_row + num_rows])
        pieces = self._pieces.select(np.arange(*found))
        return piece_rows(
            self._arrays,
            dataclasses.replace(pieces, row=pieces.row - first_row),
            num_rows=num_rows,
            sequence_length=self._sequence_length,
        )


def _pack(arrays: TokenArrays, length: int, stride: int) -> DocumentPieces:
    """Cuts the documents into pieces and gives each a place, sorted by row and column."""
    num_pieces = np.where(
        arrays.lengths > 0, 1 + -(-np.maximum(arrays.lengths - length, 0) // stride), 0
    )
    document, nth = group_indices(num_pieces)
    start = nth * stride
    piece_length = np.minimum(length, arrays.lengths[document] - start)
    row, column = best_fit(piece_length, length)
    return DocumentPieces(
        document=document,
        start=start,
        length=piece_length,
        context=np.where(nth == 0, 0, length - stride),
        row=row,
        column=column,
    ).in_rows()
