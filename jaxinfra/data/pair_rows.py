"""Rows of pairs of answers: a pair lies in one row, its chosen answer before its rejected one.

Each answer with its prompt is a segment of its own: segments 2i and 2i + 1 of a row are its i-th
pair. So a row can be learned from alone, on whichever device and in whichever micro-batch it is.
"""

from typing import final

import numpy as np
from jaxtyping import Int64

from jaxinfra.data.batch import Batch
from jaxinfra.data.packing import rows_together
from jaxinfra.data.permutation import permute
from jaxinfra.data.pieces import DocumentPieces, best_fit, piece_rows
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.errors import DataError

PAIRS_VERSION = 1  # of the order below: another must not resume this one
MOST_PAIRS = 32
"""In a row: what a loss of pairs has room for."""


def pair_pieces(arrays: TokenArrays, *, sequence_length: int) -> DocumentPieces:
    """A place for each answer, pairs packed best-fit decreasing, sorted by row and column.

    Args:
        arrays: documents 2i and 2i + 1 are the answers of pair i.

    Raises:
        DataError: a pair does not fit into a row.
    """
    assert arrays.num_documents % 2 == 0, f"{arrays.num_documents} documents are no pairs"
    lengths = arrays.lengths[0::2] + arrays.lengths[1::2]
    too_long = int((lengths > sequence_length).sum())
    if too_long:
        raise DataError(
            f"{too_long:,} of {len(lengths):,} pairs do not fit into a row of "
            f"sequence_length={sequence_length} tokens: the longest has {lengths.max():,} with the "
            "prompt before both answers; raise training.sequence_length, or leave these pairs out"
        )
    row, column = best_fit(lengths, sequence_length, most=MOST_PAIRS)
    pieces = DocumentPieces(
        document=np.arange(arrays.num_documents),
        start=np.zeros(arrays.num_documents, np.int64),
        length=arrays.lengths,
        context=np.zeros(arrays.num_documents, np.int64),
        row=np.repeat(row, 2),
        column=np.stack([column, column + arrays.lengths[0::2]], axis=1).ravel(),
    )
    return pieces.select(np.lexsort((pieces.column, pieces.row)))


@final
class PairWindows:
    """All epochs' rows of pairs; sample ``n`` is the ``n % num_windows``-th of its epoch's order.

    Which pairs share a row is the same in every epoch; the order of rows is another.
    """

    def __init__(self, arrays: TokenArrays, *, sequence_length: int, seed: int):
        self.fingerprint = arrays.fingerprint
        self._arrays = arrays
        self._sequence_length = sequence_length
        self._seed = seed
        self._pieces = pair_pieces(arrays, sequence_length=sequence_length)
        self.num_windows: int = int(self._pieces.row[-1]) + 1
        self._bounds = np.searchsorted(self._pieces.row, np.arange(self.num_windows + 1))

    def batch(self, samples: Int64[np.ndarray, "B"]) -> Batch[np.ndarray]:
        """The rows of these samples, in this order."""
        epochs, index = np.divmod(samples, self.num_windows)
        parts = []
        for epoch in np.unique(epochs):
            mine = np.flatnonzero(epochs == epoch)
            key = f"pairs/{self._seed}/{epoch}"
            parts.append((mine, self._rows(permute(index[mine], size=self.num_windows, key=key))))
        return rows_together(parts)

    def _rows(self, rows: np.ndarray) -> Batch[np.ndarray]:
        first, num = self._bounds[rows], self._bounds[rows + 1] - self._bounds[rows]
        place = np.repeat(np.arange(len(rows)), num)
        nth = np.arange(len(place)) - np.repeat(np.cumsum(num) - num, num)
        pieces = self._pieces.select(first[place] + nth)
        pieces.row[:] = place
        return piece_rows(
            self._arrays, pieces, num_rows=len(rows), sequence_length=self._sequence_length
        )
