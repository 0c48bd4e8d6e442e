"""Supervision of a run's steps: stops on signals, detection of suspect steps, and exchange with the
other processes.
"""

import concurrent.futures
import dataclasses
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.run import ReliabilityConfig, RunConfig
from jaxinfra.data.batch import Batch
from jaxinfra.errors import JaxinfraError
from jaxinfra.runtime.goodput import Goodput, read_sessions, sum_causes
from jaxinfra.runtime.hashes import Mismatch, StateHash, require_same
from jaxinfra.runtime.host_exchange import ProcessRow, ProcessTable, RowAllGather, Stragglers
from jaxinfra.runtime.recorder import (
    BUSY_READERS,
    READY_BATCHES,
    RECOMPILED,
    Recorder,
    excluded_steps,
    record_incident,
)
from jaxinfra.runtime.signals import StopRequest
from jaxinfra.training.job import Job
from jaxinfra.training.progress import Progress
from jaxinfra.training.state import State
from jaxinfra.training.statistics import Fp8Watch
from jaxinfra.training.step import StepMetrics

_LOOK_EVERY_S = 0.1
_CALLBACK = 1000  # asks to stop as a signal does; no signal has this number


class Stopped(BaseException):
    """Raised to end a wait, such as for the next batch, when a signal has arrived.

    It derives from BaseException, as KeyboardInterrupt does, so that no ``except Exception``
    catches it.
    """


@final
class Agreement:
    """Agreement of all processes on the step after which they stop.

    A signal may reach only one process, or each at a different time. So each process sends with
    every step whether it was asked to stop. All processes read the same table of these flags, so
    all stop after the same step. A single process stops as soon as it is asked.

    Args:
        exchange: exchange with the other processes; None if this process is alone.
    """

    def __init__(self, request: StopRequest, exchange: RowAllGather | None):
        self._request = request
        self._exchange = exchange
        self._asked = self._agreed = 0

    def __bool__(self) -> bool:
        return self._stops != 0

    def request_stop(self) -> None:
        """Requests a stop for a callback; if a signal came first, that stays the cause."""
        self._asked = _CALLBACK

    def defer_signals(self) -> None:
        """Defers signals from now on: a signal no longer ends this process at once, but stops the
        run between two steps.
        """
        self._request.defer()

    def wait_for[T](self, make: Callable[[], T]) -> T:
        """Returns the result of ``make``, such as the next batch; a signal ends the wait.

        Raises Stopped if a signal arrives first and this is the only process. With other processes
        it keeps waiting, as they may have begun a step that needs this process.
        """
        if self._exchange is not None:
            return make()
        made: concurrent.futures.Future[T] = concurrent.futures.Future()
        threading.Thread(target=_fulfil, args=(made, make), name="input", daemon=True).start()
        while not concurrent.futures.wait([made], timeout=_LOOK_EVERY_S).done:
            if self._request and self._request.is_deferred:
                raise Stopped
        return made.result()

    @property
    def cause(self) -> str:
        """The cause for which all processes stop: the name of a signal, or a callback."""
        return "a callback" if self._stops == _CALLBACK else signal.Signals(self._stops).name

    @property
    def _wish(self) -> int:
        return int(self._request.asked or self._asked)

    @property
    def _stops(self) -> int:
        return self._wish if self._exchange is None else self._agreed

    def start(self, row: ProcessRow) -> ProcessTable | None:
        """Sends this process's stop flag and times to all processes; a collective. Returns the
        table of all rows, which ``read`` waits for.
        """
        if self._exchange is None:
            return None
        return self._exchange.start(dataclasses.replace(row, stop=float(self._wish)))

    def read(self, table: ProcessTable | None) -> list[ProcessRow]:
        """Returns one row per process from the table. If any row asks to stop, all processes are
        agreed to stop from now on.
        """
        if table is None:
            return []
        rows = table.rows()
        self._agreed = max(int(row.stop) for row in rows) or self._agreed
        return rows

    def all_agree(self) -> bool:
        """Whether all processes agree to stop now; a collective."""
        self.read(self.start(ProcessRow()))
        return bool(self)


def _fulfil[T](made: concurrent.futures.Future[T], make: Callable[[], T]) -> None:
    try:
        made.set_result(make())
    except BaseException as error:  # whoever waits gets it
        made.set_exception(error)


class PersistentFaultError(JaxinfraError):
    """Error for a device that repeatedly computes wrong results, so that a restart on it would not
    help.
    """


class DivergedError(JaxinfraError):
    """Error for a run in which too many steps in a row were not finite."""


class SuspectStep(Exception):
    """Exception for a suspect step, whose result must not be kept; the trainer rolls back to before
    the step.

    Args:
        step: first suspect step.
        text: description of the evidence.
        loss: loss of the step, if the loss is suspect.
        hashes: hashes of the replicas of the state after the step, if they differ.
        ranks: ranks whose replica differs from the majority's.
    """

    def __init__(
        self,
        *,
        step: int,
        text: str,
        loss: float | None = None,
        hashes: np.ndarray | None = None,
        seen_at: int | None = None,
        ranks: tuple[int, ...] = (),
    ):
        super().__init__(text)
        self.step, self.text, self.loss, self.hashes = step, text, loss, hashes
        self.ranks = ranks
        self.seen_at = step if seen_at is None else seen_at


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayVerdict:
    """Verdict on a suspect step, after its replay."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


@final
class Guards:
    """Checks of every step's loss and, at intervals, of the state's replicas on different devices.

    All processes compare the same numbers, so all raise SuspectStep at the same step.

    Args:
        abstract: the state's shapes, dtypes and shardings.
    """

    def __init__(self, config: ReliabilityConfig, abstract: Any):
        self._config = config
        self._hash = StateHash(abstract)
        self._agreed_at = 0  # the newest step after which all copies were equal

    def check_loss(self, records: Sequence[dict[str, Any]], *, step: int, loss: float) -> None:
        """Raises SuspectStep if a loss is far above the losses of the steps before it."""
        factor, window = self._config.spike_factor, self._config.spike_window
        if factor is None or not math.isfinite(loss):
            return
        before: list[float] = []
        for record in reversed(records):
            value = record.get("loss")
            if record["step"] < step and value is not None:
                before.append(value)
                if len(before) == window:
                    break
        if len(before) < window:
            return
        usual = statistics.median(before)
        if loss > factor * usual:
            raise SuspectStep(
                step=step,
                loss=loss,
                text=f"loss {loss:.4f} is {loss / usual:.2f} times the recent median {usual:.4f}",
            )

    def hash_is_due(self, step: int) -> bool:
        """Whether copies of the state are to be compared after this step."""
        return self._hash.compares and is_due(step, self._config.hash_every)

    @property
    def hashes_before_saves(self) -> bool:
        """Whether copies of the state are compared before each save."""
        return self._hash.compares and self._config.hash_every is not None

    def check_state(self, state: State, *, step: int) -> None:
        """Raises SuspectStep if copies of the state after a step differ; waits for the devices."""
        table = np.asarray(self._hash(state).addressable_data(0))
        if found := self._hash.compare(table):
            raise SuspectStep(
                step=self._agreed_at + 1,
                hashes=table,
                ranks=self._voted_out(found),
                seen_at=step,
                text=f"after step {step} {self._describe(found)}; before step "
                f"{self._agreed_at + 1} all were equal",
            )
        self._agreed_at = step

    def went_back_to(self, step: int) -> None:
        """Resets the checks after the state was restored from the checkpoint of this step."""
        self._agreed_at = step

    def state_verdict(self, state: State, doubt: SuspectStep) -> ReplayVerdict:
        """Returns the verdict on a replay up to the step where replicas of the state differed.

        Raises PersistentFaultError if the replicas differ again.
        """
        assert doubt.hashes is not None
        table = np.asarray(self._hash(state).addressable_data(0))
        if again := self._hash.compare(table):
            raise PersistentFaultError(
                f"step {doubt.seen_at}, done again from a good checkpoint: "
                f"{self._describe(again)}, again: the fault is persistent; take that device's "
                "host out of the job, then continue with --resume"
            )
        self._agreed_at = doubt.seen_at
        ranks = doubt.ranks
        if not ranks:  # two copies: the one that the replay agrees with was right
            wrong = np.nonzero((table != doubt.hashes).any(axis=1))[0]
            ranks = tuple(self._hash.processes([int(row) for row in wrong]))
        named = ", ".join(map(str, ranks))
        whose = f"rank {named}" if len(ranks) == 1 else f"one of ranks {named}"
        return ReplayVerdict(
            kind="transient fault",
            ranks=ranks,
            text=f"done again, all copies are equal: a bit had flipped in the memory of {whose}",
        )

    def _voted_out(self, found: Sequence[Mismatch]) -> tuple[int, ...]:
        rows = sorted({row for mismatch in found if not mismatch.is_tie for row in mismatch.odd})
        return tuple(self._hash.processes(rows))

    def _describe(self, found: Sequence[Mismatch]) -> str:
        first = found[0]
        ranks = ", ".join(map(str, self._hash.processes(first.odd)))
        devices = ", ".join(str(self._hash.devices[row]) for row in first.odd)
        more = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
        if first.is_tie:
            return f"{first.tensor}{more} is not the same on {devices} (ranks {ranks})"
        return f"{first.tensor}{more} on {devices} (rank {ranks}) is not what the other copies are"


def is_due(step: int, every: int | None) -> bool:
    """Whether an action that runs every ``every`` steps is due after this step."""
    return every is not None and step > 0 and step % every == 0


def loss_verdict(doubt: SuspectStep, loss: float) -> ReplayVerdict:
    """Returns the verdict on a step with a suspect loss, from the loss of its replay."""
    if loss != doubt.loss:
        return ReplayVerdict(
            kind="transient fault",
            text=f"done again, the loss is {loss:.6g} and not {doubt.loss:.6g}: the batch is good, "
            "and a fault that passed had spoilt the step",
        )
    return ReplayVerdict(
        kind="bad batch",
        text=f"done again, the loss is {loss:.6g} again: the batch is bad",
    )


def require_progress(config: RunConfig, values: StepMetrics, *, step: int, path: Path) -> None:
    """Raises DivergedError if too many steps in a row were skipped as not finite."""
    limit = config.training.max_bad_steps
    if int(values.skipped_in_a_row) >= limit:
        raise DivergedError(
            f"step {step}: {int(values.skipped_in_a_row)} steps in a row had a loss or a gradient "
            f"that is not finite (max_bad_steps={limit}); lower optimizer.learning_rate in a new "
            f"run, or from the last checkpoint with --resume {path}"
        )


def require_applied(last: dict[str, Any] | None, *, steps: int) -> None:
    """Raises DivergedError if every step of a run was skipped, according to its last record."""
    if last is not None and last["skipped"] >= steps:
        raise DivergedError(
            f"none of {steps} steps was applied: each had a loss or a gradient that is not finite, "
            "or no token that counts; see what it starts from, optimizer.learning_rate and the data"
        )


def same_program(
    job: Job, state: State, batch: Batch, *, record: Callable[[str], None]
) -> Callable[..., Any]:
    """Returns the compiled training step, after checking that all processes compiled the same
    program.

    Args:
        record: called with the program's fingerprint, if there are several processes.

    Raises ConfigError that names the ranks whose programs differ.
    """
    if jax.process_count() == 1:
        return job.train_step
    lowered = job.train_step.lower(state, batch)
    program = "program of the training step"
    prints = require_same(
        {
            "version of jax": jax.__version__,
            "config": codec.to_json(job.config),
            program: lowered.as_text(),
        }
    )
    record(prints[program])
    return lowered.compile()


@final
class Watch:
    """Supervision of one rank. It records events in the rank's flight recorder and exchanges times
    with other ranks; process 0 also writes the run's goodput and incident files.

    Args:
        began: wall-clock time of the session's start.
        lost_s: compute seconds of the previous session's steps that this session repeats.
        excluded: steps whose batches the checkpoint lists as excluded.
    """

    def __init__(
        self,
        *,
        run: RunDirectory,
        recorder: Recorder,
        stop: Agreement,
        config: ReliabilityConfig,
        progress: Progress,
        began: float,
        lost_s: float,
        excluded: Iterable[int] = (),
    ):
        self._run = run
        self._recorder = recorder
        self.stop = stop
        self._config = config
        self._progress = progress
        self._is_first = jax.process_index() == 0
        self._goodput = Goodput(run.goodput_file, run.prometheus_file, began=began, lost_s=lost_s)
        # A CPU is shared with all else that runs there: a few milliseconds say nothing of it.
        is_shared = jax.default_backend() == "cpu"
        self._stragglers = Stragglers(probe_margin_s=0.05 if is_shared else 0.001)
        self._fp8 = Fp8Watch()
        self._probe = device_probe() if jax.process_count() > 1 else None
        self._probe_s = 0.0
        self._shapes: dict[str, str] = {}  # of the last batch
        self.excluded = {*config.exclude_steps, *excluded, *excluded_steps(run.incidents_file)}

    def phase(self, name: str, step: int) -> float:
        """Records that a phase of a step begins; returns the seconds of the previous phase."""
        return self._recorder.phase(name, step=step)

    def begin_input(self, step: int, *, num_ready: int, busy_readers: float) -> None:
        """Records that the wait for a batch begins, with the number of batches that are ready.

        Args:
            busy_readers: fraction of the time in which the reader threads were busy.
        """
        self.phase("input", step)
        self._recorder.event(READY_BATCHES, step=step, value=num_ready)
        if not num_ready:
            self._recorder.event(BUSY_READERS, step=step, value=busy_readers)

    def note_shapes(self, batch: Any, step: int) -> None:
        """Records which arrays of a batch have new shapes, for which the step is compiled again."""
        shapes = {
            jax.tree_util.keystr(path, simple=True): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        }
        before, self._shapes = self._shapes, shapes
        changed = [
            f"batch.{name} was {before[name]} and is {shape}"
            for name, shape in shapes.items()
            if name in before and before[name] != shape
        ]
        if changed:
            self.incident(RECOMPILED, step=step, text="; ".join(changed))

    def program(self, fingerprint: str) -> None:
        """Records the fingerprint of the compiled training step."""
        self._recorder.event(f"program {fingerprint}", step=self._recorder.step)

    def send(self, *, input_s: float, host_s: float, rows_checksum: int) -> ProcessTable | None:
        """Sends this process's own seconds and the checksum of its rows to all processes; a
        collective.
        """
        row = ProcessRow(
            input_s=input_s, host_s=host_s, probe_s=self._probe_s, rows_checksum=rows_checksum
        )
        self._probe_s = 0.0
        return self.stop.start(row)

    def report_stragglers(
        self, rows: Sequence[ProcessRow], *, step: int, step_s: float | None
    ) -> None:
        """Reports ranks that are slower than the others, which wait for them."""
        for rank, cause, text in self._stragglers.add(rows, step_s=step_s):
            self.incident("slow rank", step=step, text=text, rank=rank, cause=cause)

    def probe_is_due(self, step: int) -> bool:
        """Whether this process's own devices are to be timed before a step."""
        return self._probe is not None and is_due(step, self._config.probe_every)

    def probe(self, step: int) -> None:
        """Times a small matmul on this process's devices, which must be idle."""
        assert self._probe is not None
        self.phase("probe", step)
        self._probe_s = self._probe()
        self._recorder.event("probe_s", step=step, value=self._probe_s)

    def incident(self, kind: str, *, step: int, text: str, **details: Any) -> None:
        """Prints and logs an incident, on all processes alike."""
        self._recorder.event(kind, step=step)
        self._progress.message(f"{kind.upper()}: step {step}: {text}")
        if self._is_first:
            record_incident(self._run.incidents_file, kind, step=step, text=text, **details)

    def report_fp8_overflow(self, emitted: dict[str, Any], *, step: int) -> None:
        """Reports 8-bit matmuls whose operands outgrow the range of their format."""
        for text in self._fp8.add(emitted):
            self.incident("fp8 diverges", step=step, text=text)

    def undone(self, records: Sequence[dict[str, Any]]) -> None:
        """Adds the compute seconds of steps undone by a roll-back to the goodput's lost time."""
        self._goodput.lost_s += compute_s(records)

    def snapshot(
        self, *, step: int, record: dict[str, Any] | None = None, now: bool = False
    ) -> None:
        """Writes a snapshot of the goodput ledger, at most every two seconds unless ``now``."""
        if self._is_first:
            gauges = {
                name: float(record[name])
                for name in ("loss", "gradient_norm", "step_s", "skipped")
                if record and record.get(name) is not None
            }
            self._goodput.snapshot(self._recorder.seconds(), step=step, gauges=gauges, now=now)

    def totals(self, *, step: int) -> dict[str, float]:
        """Sums the seconds of each cause over all sessions, up to now."""
        self.snapshot(step=step, now=True)
        return sum_causes(read_sessions(self._run.goodput_file))


def compute_s(records: Sequence[dict[str, Any]]) -> float:
    """Sums the step times of these records in seconds."""
    return sum(record.get("step_s") or 0.0 for record in records)


def device_probe() -> Callable[[], float]:
    """Returns a function that times a matmul of a few milliseconds on all local devices, to find a
    slow one; they must be idle.
    """
    size = 256 if jax.default_backend() == "cpu" else 4096
    inputs = [
        jax.device_put(jnp.full((size, size), 1.0 / size), device) for device in jax.local_devices()
    ]
    work = jax.jit(lambda x: x @ x @ x @ x)

    def seconds() -> float:
        jax.block_until_ready(inputs)
        began = time.perf_counter()
        jax.block_until_ready([work(x) for x in inputs])
        return time.perf_counter() - began

    seconds()  # compiles
    return seconds
