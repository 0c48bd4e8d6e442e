"""Windows of packed documents by random access: the only state is an index.

In each epoch the documents follow one another in an order chosen by the seed, each preceded by its
separator. This stream is cut into windows of ``sequence_length``, and the windows are shuffled too.
Both orders are keyed permutations, so the contents of a sample depend on its number only.

The target of a document's last token is the separator that ends it, never a token of the next
document: a model learns to stop. Targets of weight 0 are the padding after the last document of an
epoch and, where the arrays say which tokens count, all other tokens and these separators.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from jaxtyping import Int64, Integer

from jaxinfra.data.batch import Batch
from jaxinfra.data.pieces import DocumentPieces, group_indices, piece_rows
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.errors import DataError

ORDER_VERSION = 1  # of the functions below: another order must not resume this one


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Epoch:
    order: np.ndarray  # documents, in stream order
    bounds: np.ndarray  # [documents + 1]: where each starts in the stream


@final
class PackedWindows:
    """Windows of packed documents; sample ``n`` is window ``n % num_windows`` of its epoch."""

    def __init__(self, arrays: TokenArrays, *, sequence_length: int, seed: int):
        if not arrays.num_tokens:
            raise DataError("no document has a token; there is nothing to train on")
        self.identity: dict[str, int | str] = {}
        self._arrays = arrays
        self._sequence_length = sequence_length
        self._seed = seed
        self._stream_length = arrays.num_tokens + arrays.num_documents  # a separator each
        self.num_windows: int = -(-self._stream_length // sequence_length)
        # Batches of two epochs are in flight around each epoch's end.
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, samples: Int64[np.ndarray, "B"]) -> Batch[np.ndarray]:
        """Returns the windows of these sample numbers, in this order."""
        return rows_of_epochs(samples, self.num_windows, self._rows)

    def num_read(self, num_samples: int) -> int:
        """Counts tokens and separators in the first ``num_samples`` samples, padding excluded."""
        epochs, rest = divmod(num_samples, self.num_windows)
        read = epochs * self._stream_length + rest * self._sequence_length
        # The last window of the stream, wherever the epoch's order has it, ends with padding.
        last = np.array([self.num_windows - 1])
        key = f"windows/{self._seed}/{epochs}"
        if permute(last, size=self.num_windows, key=key, inverse=True)[0] < rest:
            read -= self.num_windows * self._sequence_length - self._stream_length
        return read

    def _make_epoch(self, epoch: int) -> _Epoch:
        lengths = self._arrays.lengths
        order = permute(
            np.arange(len(lengths)), size=len(lengths), key=f"documents/{self._seed}/{epoch}"
        )
        bounds = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths[order] + 1, out=bounds[1:])
        return _Epoch(order=order, bounds=bounds)

    def _rows(self, epoch: int, index: np.ndarray) -> Batch[np.ndarray]:
        """The windows of these numbers in an epoch."""
        key, length = f"windows/{self._seed}/{epoch}", self._sequence_length
        start = permute(index, size=self.num_windows, key=key) * length
        end = np.minimum(start + length, self._stream_length)
        bounds = self._epoch(epoch).bounds
        first = np.searchsorted(bounds, start, side="right") - 1
        last = np.searchsorted(bounds, end - 1, side="right") - 1
        row, nth = group_indices(last - first + 1)
        place = first[row] + nth
        begin = np.maximum(bounds[place], start[row])
        pieces = DocumentPieces(
            document=self._epoch(epoch).order[place],
            start=begin - bounds[place],
            length=np.minimum(bounds[place + 1], end[row]) - begin,
            context=np.zeros(len(row), np.int64),
            row=row,
            column=begin - start[row],
        )
        return piece_rows(self._arrays, pieces, num_rows=len(index), sequence_length=length)


def rows_of_epochs(
    samples: Int64[np.ndarray, "B"],
    num_rows: int,
    rows_of: Callable[[int, np.ndarray], Batch[np.ndarray]],
) -> Batch[np.ndarray]:
    """Makes the batch rows of these sample numbers, in this order; they may span epochs.

    Args:
        num_rows: number of rows of an epoch.
        rows_of: makes rows of one epoch, from its number and theirs.
    """
    epochs, index = np.divmod(samples, num_rows)
    parts = []
    for epoch in np.unique(epochs):
        mine = np.flatnonzero(epochs == epoch)
        parts.append((mine, rows_of(int(epoch), index[mine])))
    return merge_rows(parts)


def merge_rows(parts: Sequence[tuple[np.ndarray, Batch[np.ndarray]]]) -> Batch[np.ndarray]:
    """Joins parts of a batch; each comes with the indices of its rows in the batch."""
    if len(parts) == 1 and (np.diff(parts[0][0]) == 1).all():
        return parts[0][1]
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(Batch):
        first = getattr(parts[0][1], field.name)
        if first is None:
            continue
        shape = (sum(len(rows) for rows, _ in parts), *first.shape[1:])
        merged[field.name] = np.empty(shape, first.dtype)
        for rows, part in parts:
            merged[field.name][rows] = getattr(part, field.name)
    return Batch(**merged)


_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permute(
    index: Integer[np.ndarray, "*shape"], *, size: int, key: str, inverse: bool = False
) -> Int64[np.ndarray, "*shape"]:
    """Maps each ``index`` by a pseudo-random permutation of ``range(size)``, or by its inverse.

    An eight-round Feistel network on the bits of the index; a result outside the range is sent
    through again (cycle walking: Black and Rogaway 2002), which keeps it a bijection. No table is
    stored, and unlike NumPy's generators the order can never change with a library's version, so
    a checkpoint's data order outlives the environment that wrote it.
    """
    value = np.array(index, dtype=np.uint64, ndmin=1)
    num_bits = (size - 1).bit_length()
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype="<u8")
    rounds = list(enumerate(keys))  # each undoes itself
    if inverse:
        rounds.reverse()

    def once(x: np.ndarray) -> np.ndarray:
        high, low = x >> low_bits, x & low_mask
        for round_index, round_key in rounds:
            if round_index % 2:
                low = low ^ (_mix(high ^ round_key) & low_mask)
            else:
                high = high ^ (_mix(low ^ round_key) & high_mask)
        return (high << low_bits) | low

    value = once(value)
    while (outside := value >= size).any():
        value[outside] = once(value[outside])
    return value.astype(np.int64).reshape(np.shape(index))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
