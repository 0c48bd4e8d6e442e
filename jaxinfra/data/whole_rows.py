"""Rows of whole documents, conversations or pairs of answers, none of which is split.

Both answers of a pair share one row, the chosen before the rejected one. Each answer with its
prompt is a segment of its own: segments 2i and 2i + 1 of a row are its i-th pair. So a row can be
learned from alone, on any device and in any micro-batch.
"""

import functools
import logging
from collections.abc import Mapping
from typing import final

import numpy as np
from jaxtyping import Int64

from jaxinfra.config.data import Packing, TooLong
from jaxinfra.data.batch import Batch
from jaxinfra.data.packing import permute, rows_of_epochs
from jaxinfra.data.pieces import DocumentPieces, best_fit, group_indices, next_fit, piece_rows
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.errors import DataError

_LOG = logging.getLogger(__name__)
PACKING_VERSION = 1  # of the order of conversations, too
PAIRS_VERSION = 1  # of the order below: another must not resume this one
MOST_PAIRS = 32
"""Largest number of pairs in a row; the loss of pairs allocates for this many."""


def pair_pieces(arrays: TokenArrays, *, sequence_length: int) -> DocumentPieces:
    """Assigns both answers of each pair to one row, best-fit decreasing; sorted by row and column.

    Args:
        arrays: token arrays in which documents 2i and 2i + 1 are the answers of pair i.

    Raises:
        DataError: a pair is longer than a row.
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
    return DocumentPieces(
        document=np.arange(arrays.num_documents),
        start=np.zeros(arrays.num_documents, np.int64),
        length=arrays.lengths,
        context=np.zeros(arrays.num_documents, np.int64),
        row=np.repeat(row, 2),
        column=np.stack([column, column + arrays.lengths[0::2]], axis=1).ravel(),
    ).in_rows()


def conversation_pieces(
    arrays: TokenArrays, *, sequence_length: int, packing: Packing, too_long: TooLong
) -> tuple[DocumentPieces, str]:
    """Assigns each conversation, whole or cut at its end, to a row; logs those cut or dropped.

    A conversation is left out if no token counts in the part of it that is read.

    Raises:
        DataError: no conversation is left.
    """
    is_long = arrays.lengths > sequence_length
    length = np.minimum(arrays.lengths, sequence_length)
    has_any = length > 0
    if arrays.counted is not None:
        sums = np.concatenate(([0], np.cumsum(arrays.counted, dtype=np.int64)))
        has_any = sums[arrays.starts + length] > sums[arrays.starts]
    document = np.flatnonzero(has_any & ~is_long if too_long is TooLong.DROP else has_any)
    said = []
    if is_long.any():
        done = {TooLong.DROP: "dropped", TooLong.CUT: "cut at its end"}[too_long]
        said.append(
            f"{is_long.sum():,} of {len(is_long):,} conversations are longer than "
            f"sequence_length={sequence_length} and {done} (data.too_long={too_long})"
        )
    uncounted = ~has_any & ~is_long if too_long is TooLong.DROP else ~has_any
    if uncounted.any():
        said.append(f"{uncounted.sum():,} without a token that counts are left out")
    if not document.size:
        raise DataError(
            f"no conversation is left to train on: {'; '.join(said)}; raise "
            "training.sequence_length, or see what the data hold"
        )
    length = length[document]
    match packing:
        case Packing.ALONE:
            row, column = np.arange(len(document)), np.zeros(len(document), np.int64)
        case Packing.IN_ORDER:
            row, column = next_fit(length, sequence_length)
        case _:
            row, column = best_fit(length, sequence_length)
    num_rows = int(row.max()) + 1
    fill = length.sum() / (num_rows * sequence_length)
    said.insert(0, f"{len(document):,} conversations in {num_rows:,} rows, {fill:.1%} full")
    zeros = np.zeros(len(document), np.int64)
    pieces = DocumentPieces(
        document=document, start=zeros, length=length, context=zeros, row=row, column=column
    )
    return pieces.in_rows(), "; ".join(said)


@final
class WholeRows:
    """Rows of whole documents; sample ``n`` is number ``n % num_windows`` of its epoch.

    Documents share the same rows in every epoch; the order of rows changes.

    Args:
        pieces: documents with their row and column, sorted by them.
        kind: kind of the documents, conversations or pairs, which is part of the order's key.
        identity: other values that the order depends on; compared when a run is resumed.
    """

    def __init__(
        self,
        arrays: TokenArrays,
        pieces: DocumentPieces,
        *,
        sequence_length: int,
        seed: int,
        kind: str,
        identity: Mapping[str, int | str],
    ):
        self.fingerprint, self.identity = arrays.fingerprint, dict(identity)
        self._arrays = arrays
        self._sequence_length = sequence_length
        self._seed, self._kind = seed, kind
        self._pieces = pieces
        self.num_windows: int = int(self._pieces.row[-1]) + 1
        self._fill = np.bincount(pieces.row, weights=pieces.length).astype(np.int64)
        self._read = functools.lru_cache(maxsize=2)(self._make_read)
        self._bounds = np.searchsorted(self._pieces.row, np.arange(self.num_windows + 1))

    def batch(self, samples: Int64[np.ndarray, "B"]) -> Batch[np.ndarray]:
        """Returns the rows of these sample numbers, in this order."""
        return rows_of_epochs(samples, self.num_windows, self._rows)

    def num_read(self, num_samples: int) -> int:
        """Counts the tokens in the first ``num_samples`` samples, padding excluded."""
        epochs, rest = divmod(num_samples, self.num_windows)
        return epochs * int(self._fill.sum()) + int(self._read(epochs)[rest])

    def _make_read(self, epoch: int) -> np.ndarray:
        order = self._order(epoch, np.arange(self.num_windows))
        return np.concatenate(([0], np.cumsum(self._fill[order])))

    def _order(self, epoch: int, index: np.ndarray) -> np.ndarray:
        key = f"{self._kind}/{self._seed}/{epoch}"
        return permute(index, size=self.num_windows, key=key)

    def _rows(self, epoch: int, index: np.ndarray) -> Batch[np.ndarray]:
        rows = self._order(epoch, index)
        place, nth = group_indices(self._bounds[rows + 1] - self._bounds[rows])
        pieces = self._pieces.select(self._bounds[rows][place] + nth)
        pieces.row[:] = place
        return piece_rows(
            self._arrays, pieces, num_rows=len(rows), sequence_length=self._sequence_length
        )


def pair_rows(arrays: TokenArrays, *, sequence_length: int, seed: int) -> WholeRows:
    """Makes training rows of pairs of answers; raises DataError if a pair is longer than a row."""
    return WholeRows(
        arrays,
        pair_pieces(arrays, sequence_length=sequence_length),
        sequence_length=sequence_length,
        seed=seed,
        kind="pairs",
        identity={"pairs_version": PAIRS_VERSION},
    )


def conversation_rows(
    arrays: TokenArrays, *, sequence_length: int, seed: int, packing: Packing, too_long: TooLong
) -> WholeRows:
    """Makes rows of conversations, logs how many were cut; raises DataError if none is left."""
    pieces, said = conversation_pieces(
        arrays, sequence_length=sequence_length, packing=packing, too_long=too_long
    )
    _LOG.log(logging.WARNING if ";" in said else logging.INFO, "%s", said)
    return WholeRows(
        arrays,
        pieces,
        sequence_length=sequence_length,
        seed=seed,
        kind="conversations",
        identity={"packing": f"{packing}/{too_long}", "packing_version": PACKING_VERSION},
    )
