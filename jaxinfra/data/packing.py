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
from collections.abc import Sequence
from typing import final

import numpy as np
from jaxtyping import Int64

from jaxinfra.data.batch import Batch
from jaxinfra.data.permutation import permute
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.errors import DataError

ORDER_VERSION = 1  # of the functions below: another order must not resume this one


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Epoch:
    order: np.ndarray  # documents, in stream order
    bounds: np.ndarray  # [documents + 1]: where each starts in the stream


@final
class PackedWindows:
    """Windows of packed documents for all epochs; sample ``n`` is number ``n % num_windows`` in its
    epoch's order.
    """

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
        epochs, index = np.divmod(samples, self.num_windows)
        parts = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            windows = permute(
                index[rows], size=self.num_windows, key=f"windows/{self._seed}/{epoch}"
            )
            parts.append((rows, self._rows(self._epoch(int(epoch)), windows)))
        return rows_together(parts)

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

    def _rows(self, epoch: _Epoch, windows: np.ndarray) -> Batch[np.ndarray]:
        arrays, bounds, length = self._arrays, epoch.bounds, self._sequence_length
        column = np.arange(length)
        start = windows * length
        end = np.minimum(start + length, self._stream_length)
        first = np.searchsorted(bounds, start, side="right") - 1
        last = np.searchsorted(bounds, end - 1, side="right") - 1

        # Segments: count the document starts at or left of each column, the first one aside.
        num_inside = last - first
        row = np.repeat(np.arange(len(windows)), num_inside)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(num_inside) - num_inside, num_inside)
        begins = np.zeros((len(windows), length), np.int32)
        begins[row, bounds[first[row] + 1 + nth] - start[row]] = 1
        segment_ids = np.cumsum(begins, axis=1, dtype=np.int32)

        nth_document = first[:, None] + segment_ids
        begin = bounds[nth_document]
        offset = start[:, None] + column[None, :] - begin  # 0 at the separator
        document = epoch.order[nth_document]
        ends = offset == arrays.lengths[document]
        source = arrays.starts[document] + offset
        # The index past a document's end is never used, but must stay inside the array.
        following = arrays.tokens[np.minimum(source, len(arrays.tokens) - 1)].astype(np.int32)
        tokens = np.empty_like(following)
        tokens[:, 1:] = following[:, :-1]
        tokens[:, 0] = arrays.tokens[np.maximum(source[:, 0] - 1, 0)]
        tokens[offset == 0] = arrays.bos_id
        weights = np.ones(tokens.shape, np.float32)
        if arrays.counted is not None:
            weights[:] = arrays.counted[np.minimum(source, len(arrays.tokens) - 1)]
            weights[ends] = 0.0  # a conversation ends with the model's turn, which says so itself
        following[ends] = arrays.eos_id
        positions = np.minimum(offset, column[None, :]).astype(np.int32)

        if (padding := column[None, :] >= (end - start)[:, None]).any():
            segment_ids[padding], positions[padding], weights[padding] = -1, 0, 0.0
            tokens[padding], following[padding] = arrays.eos_id, arrays.eos_id
        return Batch(
            tokens=tokens,
            targets=following,
            segment_ids=segment_ids,
            positions=positions,
            weights=weights,
        )


def rows_together(parts: Sequence[tuple[np.ndarray, Batch[np.ndarray]]]) -> Batch[np.ndarray]:
    """Joins parts of a batch into one; each part is given with the numbers of its rows in the
    batch.
    """
    if len(parts) == 1 and (np.diff(parts[0][0]) == 1).all():
        return parts[0][1]
    merged = {}
    for field in dataclasses.fields(Batch):
        first = getattr(parts[0][1], field.name)
        if first is None:
            continue
        shape = (sum(len(rows) for rows, _ in parts), *first.shape[1:])
        merged[field.name] = np.empty(shape, first.dtype)
        for rows, part in parts:
            merged[field.name][rows] = getattr(part, field.name)
    return Batch(**merged)
