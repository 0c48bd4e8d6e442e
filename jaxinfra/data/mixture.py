"""Several sources in every batch: the source of each row, as a function of the step alone.

Each source is packed and shuffled by itself (``packing``). One epoch reads it from its first sample
to its last; the next one has another order. A step takes from each source as many rows as its share
of the batch says, in an order chosen by the seed.

A share is rarely a whole number of rows. The sources divide the line from 0 to 1 by their shares,
and row i of a step's B rows belongs to the source at ``(i + v) / B`` (systematic sampling). The
offset v moves by the golden ratio between steps, so over many steps each source is read as
often as its shares say, within a few rows.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from jaxtyping import Float64, Int64

from jaxinfra.config.mixture import MixtureBetween, MixtureSource, MixtureUnit, turning_points
from jaxinfra.data.batch import Batch
from jaxinfra.data.packing import PackedWindows, merge_rows, permute
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.whole_rows import WholeRows
from jaxinfra.errors import DataError

MIXTURE_VERSION = 1  # of what decides whose a row is: another must not resume this one
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_BLOCK = 1024  # steps whose rows are summed at a time


@final
class MixtureSchedule:
    """The sources' shares of the batch by step, and the rows of each that follow from them."""

    def __init__(
        self,
        sources: tuple[MixtureSource, ...],
        *,
        between: MixtureBetween,
        unit: MixtureUnit,
        batch_size: int,
        sequence_length: int,
        seed: int,
    ):
        self.names = tuple(each.name for each in sources)
        self.batch_size = batch_size
        self._per_step = 1 if unit is MixtureUnit.STEPS else batch_size * sequence_length
        self._is_linear = between is MixtureBetween.LINEAR
        times = turning_points(sources)
        self._times = np.array(times, np.int64)
        self._weights = np.array(
            [[each.weight_at(time, between) for each in sources] for time in times]
        )
        digest = hashlib.sha256(f"mixture/{seed}".encode()).digest()
        self._begin = np.frombuffer(digest[:8], "<u8")[0]
        self._sums = [np.zeros(len(sources), np.int64)]  # rows before each block of steps
        self._lock = threading.Lock()

    def shares(self, steps: Int64[np.ndarray, "N"]) -> Float64[np.ndarray, "N S"]:
        """Returns each source's share of these steps' batches; a step's shares sum to 1."""
        return np.diff(self._bounds(steps), axis=1, prepend=0.0)

    def rows(self, steps: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N S"]:
        """Counts the rows of each source in the batches of these steps."""
        place = self._begin + steps.astype(np.uint64) * _GOLDEN
        shift = (place >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        before = np.ceil(self._bounds(steps) * self.batch_size - shift[:, None])
        return np.diff(np.maximum(before, 0.0).astype(np.int64), axis=1, prepend=0)

    def rows_before(self, step: int) -> Int64[np.ndarray, "S"]:
        """Counts the samples of each source that all steps before this one have read."""
        block, _ = divmod(step, _BLOCK)
        with self._lock:
            while len(self._sums) <= block:
                first = (len(self._sums) - 1) * _BLOCK
                rows = self.rows(np.arange(first, first + _BLOCK)).sum(axis=0)
                self._sums.append(self._sums[-1] + rows)
        return self._sums[block] + self.rows(np.arange(block * _BLOCK, step)).sum(axis=0)

    def mean_shares(self, num_steps: int) -> Float64[np.ndarray, "S"]:
        """Returns each source's share of all batches before ``num_steps``, by its weights."""
        total = np.zeros(len(self.names))
        for first in range(0, num_steps, 1 << 16):
            total += self.shares(np.arange(first, min(first + (1 << 16), num_steps))).sum(axis=0)
        return total / max(num_steps, 1)

    def _bounds(self, steps: Int64[np.ndarray, "N"]) -> Float64[np.ndarray, "N S"]:
        """Returns the end of each source's part of the line from 0 to 1."""
        time = steps.astype(np.float64) * self._per_step
        place = np.searchsorted(self._times, time, side="right") - 1
        weights = self._weights[place]
        if self._is_linear:
            later = np.minimum(place + 1, len(self._times) - 1)
            length = np.maximum(self._times[later] - self._times[place], 1)
            way = np.where(later > place, (time - self._times[place]) / length, 0.0)
            weights = weights + (self._weights[later] - weights) * way[:, None]
        # Summed in order, not in the pairs or lanes that this machine's np.sum takes.
        sums = np.cumsum(weights, axis=1)
        return sums / sums[:, -1:]


@final
class MixedWindows:
    """Batches that mix several sources, by random access: the only state is the step number.

    Args:
        rows_of: makes the rows of one source from its token arrays; windows by default.
    """

    def __init__(
        self,
        sources: Mapping[str, TokenArrays],
        schedule: MixtureSchedule,
        *,
        sequence_length: int,
        seed: int,
        rows_of: Callable[[TokenArrays], WholeRows] | None = None,
    ):
        assert tuple(sources) == schedule.names, f"{tuple(sources)} for {schedule.names}"
        for name, arrays in sources.items():
            if arrays.num_tokens + arrays.num_documents < sequence_length:
                raise DataError(
                    f"mixture source {name!r} has {arrays.num_tokens:,} tokens to train on, fewer "
                    f"than a sequence of {sequence_length}: its rows would be mostly padding; give "
                    "it more text, shorten training.sequence_length, or leave it out"
                )
        self._schedule = schedule
        self._seed = seed
        self._windows: dict[str, PackedWindows | WholeRows] = {
            name: PackedWindows(arrays, sequence_length=sequence_length, seed=seed)
            if rows_of is None
            else rows_of(arrays)
            for name, arrays in sources.items()
        }

        self._fingerprints = {
            name: " ".join([sources[name].fingerprint, *map(str, each.identity.values())])
            for name, each in self._windows.items()
        }

    def batch(self, step: int, rows: slice) -> Batch[np.ndarray]:
        """Returns the selected rows of a step's batch."""
        source, sample = (each[rows] for each in self._drawn(step))
        windows = list(self._windows.values())
        parts = []
        for number in np.unique(source):
            mine = np.flatnonzero(source == number)
            parts.append((mine, windows[number].batch(sample[mine])))
        return merge_rows(parts)

    def row_sources(self, step: int) -> list[str]:
        """Returns the name of the source of each row of a step's batch."""
        names = list(self._windows)
        return [names[number] for number in self._drawn(step)[0]]

    def _drawn(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the sample of each row of a step's batch."""
        schedule, size = self._schedule, self._schedule.batch_size
        counts, before = schedule.rows(np.array([step]))[0], schedule.rows_before(step)
        source = np.repeat(np.arange(len(counts)), counts)
        sample = np.arange(size) + (before - np.cumsum(counts) + counts)[source]
        # So that a device, or a micro-batch, does not have the rows of one source.
        drawn = permute(np.arange(size), size=size, key=f"mixture/{self._seed}/{step}")
        return source[drawn], sample[drawn]

    def read(self, step: int) -> dict[str, float]:
        """Counts each source's rows and tokens before ``step``, as ``mixture/SOURCE/WHAT``."""
        record: dict[str, float] = {}
        rows = self._schedule.rows_before(step).tolist()
        for (name, windows), num_rows in zip(self._windows.items(), rows, strict=True):
            record[f"mixture/{name}/sequences"] = num_rows
            record[f"mixture/{name}/tokens"] = windows.num_read(num_rows)
            record[f"mixture/{name}/epochs"] = num_rows / windows.num_windows
        return record

    def state(self, step: int) -> dict[str, Any]:
        """Returns a checkpoint's state of the mixture: each source's identity and rows read."""
        rows = self._schedule.rows_before(step).tolist()
        return {
            name: {"data": fingerprint, "samples": num_rows}
            for (name, fingerprint), num_rows in zip(self._fingerprints.items(), rows, strict=True)
        }

    def require_same(self, saved: Any, step: int) -> None:
        """Raises DataError unless a saved run's steps before this one read the same samples.

        Later weights may change, and sources of which no row was read may come and go.
        """

        def of(sources: Any, name: str) -> tuple[Any, Any]:
            found = sources.get(name) if isinstance(sources, dict) else None
            return (found.get("data"), found.get("samples")) if isinstance(found, dict) else (0, 0)

        ours = self.state(step)
        for name in {**(saved if isinstance(saved, dict) else {}), **ours}:
            (data, samples), (our_data, our_samples) = of(saved, name), of(ours, name)
            if samples != our_samples:
                raise DataError(
                    f"mixture source {name!r}: step {step} was reached with {samples} of its "
                    f"sequences, and the weights of this run give {our_samples}; what is past must "
                    "stay: change weights by points after that step only, with the same seed and "
                    "order of sources"
                )
            if samples and data != our_data:
                raise DataError(
                    f"mixture source {name!r} holds other text than when the run was saved; resume "
                    "with the same data and tokenizer"
                )
