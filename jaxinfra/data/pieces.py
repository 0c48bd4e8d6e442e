"""Pieces of documents, their positions in rows, and the batch that such rows make."""

import bisect
import dataclasses
import heapq
from typing import final

import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.data.token_arrays import TokenArrays


@final
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DocumentPieces:
    """Pieces of documents: ``length`` input tokens from token ``start``, and their place in rows.

    The loss does not count the first ``context`` tokens of a piece.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray
    row: np.ndarray
    column: np.ndarray

    def in_rows(self) -> "DocumentPieces":
        """Returns the pieces sorted by row, then by column."""
        return self.select(np.lexsort((self.column, self.row)))

    def select(self, index: np.ndarray) -> "DocumentPieces":
        """Returns the pieces of these indices, in this order."""
        fields = dataclasses.fields(self)
        return DocumentPieces(**{field.name: getattr(self, field.name)[index] for field in fields})


def piece_rows(
    arrays: TokenArrays, pieces: DocumentPieces, *, num_rows: int, sequence_length: int
) -> Batch[np.ndarray]:
    """Makes a batch's rows; each piece is one segment, the rest of a row is padding.

    Args:
        pieces: pieces sorted by row, then by column. A piece may include the separator after its
            document, which the loss counts unless ``arrays.counted`` is set.
    """
    shape = (num_rows, sequence_length)
    tokens = np.full(shape, arrays.eos_id, np.int32)
    targets = np.full(shape, arrays.eos_id, np.int32)
    segment_ids = np.full(shape, -1, np.int32)
    positions = np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    which, position, target = piece_targets(arrays, pieces)
    document = pieces.document[which]
    offset = pieces.start[which] + position  # of the target within its document
    ends = offset == arrays.lengths[document]
    cell = (pieces.row[which], pieces.column[which] + position)
    first_of_row = np.searchsorted(pieces.row, pieces.row)
    begin = arrays.bos_id if arrays.first is None else arrays.first[document]
    tokens[cell] = np.where(
        offset == 0, begin, arrays.tokens[np.maximum(target - 1, 0)].astype(np.int32)
    )
    target = np.minimum(target, len(arrays.tokens) - 1)  # unused where it is past the document
    targets[cell] = np.where(ends, arrays.eos_id, arrays.tokens[target].astype(np.int32))
    segment_ids[cell] = (np.arange(len(pieces.row)) - first_of_row)[which]
    positions[cell] = position
    weights[cell] = position >= pieces.context[which]
    if arrays.counted is not None:
        weights[cell] *= arrays.counted[target] * ~ends
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


def piece_targets(
    arrays: TokenArrays, pieces: DocumentPieces
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns three integers for each input token of the pieces, in order.

    They are the number of the token's piece, its position in the piece, and the index of its target
    among the tokens of ``arrays``.
    """
    which, position = group_indices(pieces.length)
    target = arrays.starts[pieces.document[which]] + pieces.start[which] + position
    return which, position, target


def group_indices(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each element's group, and its index in the group, for consecutive groups.

    Args:
        counts: number of elements of each group.
    """
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def best_fit(
    lengths: np.ndarray, capacity: int, *, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns pieces to rows, best-fit decreasing: longest first, each to the fullest row with
    space.

    Args:
        most: most pieces per row; None: no limit.
    """
    row = np.zeros(len(lengths), np.int64)
    column = np.zeros(len(lengths), np.int64)
    rows: dict[int, list[int]] = {}  # those with so much room left, the first of them first
    rooms: list[int] = []  # for which there are any, sorted
    held: list[int] = []  # of each row
    for index in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[index])
        place = bisect.bisect_left(rooms, need)
        if place < len(rooms):
            left = rooms[place]
            chosen = heapq.heappop(rows[left])
            if not rows[left]:
                del rooms[place]
        else:
            left, chosen = capacity, len(held)
            held.append(0)
        row[index], column[index] = chosen, capacity - left
        held[chosen] += 1
        if left > need and held[chosen] != most:
            others = rows.setdefault(left - need, [])
            if not others:
                bisect.insort(rooms, left - need)
            heapq.heappush(others, chosen)
    return row, column


def next_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assigns pieces to rows in order, each to the last row if it fits there, else to a new one."""
    row = np.zeros(len(lengths), np.int64)
    column = np.zeros(len(lengths), np.int64)
    number, end = 0, 0
    for index, need in enumerate(lengths.tolist()):
        if end + need > capacity:
            number, end = number + 1, 0
        row[index], column[index] = number, end
        end += need
    return row, column
