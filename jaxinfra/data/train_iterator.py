"""Training batches: the samples of each step, and a resumable Grain iterator over the batches."""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, final

import grain
import numpy as np
from jaxtyping import Int64

from jaxinfra.data.batch import Batch
from jaxinfra.data.mixture import MIXTURE_VERSION, MixedWindows
from jaxinfra.data.packing import ORDER_VERSION, PackedWindows
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.whole_rows import WholeRows
from jaxinfra.errors import DataError

# Epochs follow one another without end; a run's last step is the trainer's affair.
_NUM_STEPS = 1 << 40


def sample_ids(step: int, *, batch_size: int) -> Int64[np.ndarray, "B"]:
    """Returns the sample numbers of a step's global batch, over all processes.

    Sample ``n`` is the ``n % num_windows``-th window in the shuffled order of epoch
    ``n // num_windows``; a batch may span two epochs, and no sample is dropped or repeated.
    """
    return np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)


def process_rows(*, batch_size: int, process_index: int, process_count: int) -> slice:
    """Returns the slice of the global batch's rows that a process reads.

    The rows are contiguous, so the processes' rows in order (as
    ``jax.make_array_from_process_local_data`` joins them) make one array for any process count.
    """
    if batch_size % process_count or not 0 <= process_index < process_count:
        raise DataError(
            f"batch_size={batch_size} does not divide over {process_count} processes (this is "
            f"number {process_index}); make it a multiple of {process_count}"
        )
    rows = batch_size // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


@final
class TrainIterator:
    """Endless iterator over this process's rows of batches; a run resumes from its state.

    ``num_threads`` threads prefetch ``prefetch`` batches; with 0, batches are made when asked for.

    Args:
        batch_size: number of rows of all processes.
    """

    def __init__(
        self,
        source: TokenArrays | WholeRows | MixedWindows,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        num_threads: int = 2,
        prefetch: int = 4,
    ):
        rows = process_rows(
            batch_size=batch_size, process_index=process_index, process_count=process_count
        )
        self._identity: dict[str, Any] = {
            "sequence_length": sequence_length,
            "batch_size": batch_size,
            "seed": seed,
            "order_version": ORDER_VERSION,
        }
        self._mixture = source if isinstance(source, MixedWindows) else None
        if isinstance(source, MixedWindows):
            self._identity = {"mixture_version": MIXTURE_VERSION, **self._identity}
            make = functools.partial(source.batch, rows=rows)
        else:
            windows = source
            if isinstance(windows, TokenArrays):
                windows = PackedWindows(windows, sequence_length=sequence_length, seed=seed)
            first = {**windows.identity, "data": source.fingerprint}
            self._identity = {**first, **self._identity}

            def make(step: int) -> Batch[np.ndarray]:
                return windows.batch(sample_ids(step, batch_size=batch_size)[rows])

        self._readers = _Readers()

        def read(step: int) -> Batch[np.ndarray]:
            with self._readers.working():
                return make(step)

        self._steps = grain.MapDataset.range(_NUM_STEPS).map(read)
        self._options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
        self.step = self._first = 0  # of the next batch
        self._made = _Count()
        self._iterator = self._start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch[np.ndarray]:
        batch = next(self._iterator)
        self.step += 1
        return batch

    @property
    def num_ready(self) -> int:
        """Number of prefetched batches; if it stays 0, the readers are slow."""
        return max(0, self._made.value - (self.step - self._first))

    @property
    def busy_fraction(self) -> float:
        """Fraction of batch-making time in which reader threads computed or queued for a CPU.

        For the rest of the time they waited, for example for a disk.
        """
        return self._readers.busy_s / max(self._readers.spent_s, 1e-9)

    def batch(self, step: int) -> Batch[np.ndarray]:
        """Makes this process's rows of any step's batch again, without moving the iterator."""
        rows = self._steps[step]
        assert rows is not None, "no transformation of these drops a step"
        return rows

    def sample_ids(self, step: int) -> Int64[np.ndarray, "B"]:
        """Returns the sample numbers of a step's global batch, for a ledger of samples."""
        return sample_ids(step, batch_size=self._identity["batch_size"])

    def read(self, step: int) -> dict[str, float]:
        """Counts the rows and tokens of each source of a mixture in all steps before ``step``."""
        return {} if self._mixture is None else self._mixture.read(step)

    def row_sources(self, step: int) -> list[str] | None:
        """Returns the source of each row of a step's global batch; None without a mixture."""
        return None if self._mixture is None else self._mixture.row_sources(step)

    def state(self, step: int | None = None) -> dict[str, Any]:
        """Returns the iterator's state for a checkpoint: JSON values, equal on every process.

        Args:
            step: the step to continue with; by default this iterator's next one.
        """
        step = self.step if step is None else step
        state = {"step": step, **self._identity}
        return state if self._mixture is None else {**state, "mixture": self._mixture.state(step)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues with the step stored in ``state``, on any number of processes."""
        if "own" in state:
            raise DataError(
                "the run has read batches that its script gave to jaxinfra.train(..., data=...) so "
                "far; give data= again"
            )
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the saved data order had {name}={state.get(name)!r}, this run has {value!r}; "
                    "resume with the same data, tokenizer, sequence length, batch size and seed, "
                    "or train the run's model on others in a new run (--init RUN)"
                )
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step < _NUM_STEPS:
            raise DataError(f"the saved data order has step={step!r}; it must be a step number")
        if self._mixture is not None:
            self._mixture.require_same(state.get("mixture"), step)
        self.close()
        self.step = step
        self._iterator = self._start()

    def close(self) -> None:
        """Stops the prefetching threads."""
        self._iterator.close()

    def _start(self) -> grain.DatasetIterator:
        # A slice rather than Grain's own iterator state, whose layout is not ours to promise.
        self._first, self._made = self.step, _Count()
        steps = self._steps[self.step :].map(self._made.passed)
        return iter(steps.to_iter_dataset(self._options))


@final
class _Readers:
    """Seconds that threads spend on making batches, and how long of it they were busy."""

    def __init__(self) -> None:
        self.spent_s = self.busy_s = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A thread makes a batch within."""
        began, was_busy = time.perf_counter(), _busy_s()
        try:
            yield
        finally:
            spent, busy = time.perf_counter() - began, _busy_s() - was_busy
            with self._lock:
                self.spent_s += spent
                self.busy_s += busy


def _busy_s() -> float:
    """Seconds for which this thread has run so far, or was ready to and no processor was free."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):  # no Linux, or a kernel that does not count
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class _Count:
    """Counts what passes, in whichever thread."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def passed[T](self, x: T) -> T:
        """Counts ``x`` and returns it unchanged."""
        with self._lock:
            self.value += 1
        return x
