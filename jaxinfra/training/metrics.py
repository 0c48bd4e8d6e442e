"""Metrics of a run: ``metrics.jsonl``, the same values as TensorBoard events, and callbacks that
receive them.

``jaxinfra.train(..., callbacks=[...])`` calls the callbacks on the job's first process. They get
plain numbers after the step, so they cannot change its result. An exception in one ends the run;
``StopTraining`` ends it with a checkpoint, from which the run can be resumed.
"""

import importlib
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict, final

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore  (made at import)
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.files import is_of_type, read_log
from jaxinfra.training.statistics import flat_statistics

type Record = Mapping[str, Any]
"""Values by name, ``step`` among them: one line of metrics.jsonl."""


class StopTraining(Exception):
    """Exception that a callback raises to end the run with its checkpoint, from which the run can
    be resumed. Its text is printed as the reason.

    Examples:
        >>> class Early(jaxinfra.Callback):
        ...     def on_evaluation(self, record):
        ...         if record["heldout_loss"] < 3.0:
        ...             raise jaxinfra.StopTraining("held-out loss below 3")
    """


class Callback:
    """Base class of a run's callbacks: all methods do nothing; override those that you need.

    A hook that raises ``StopTraining`` ends the run with its checkpoint, at most two steps later;
    any other exception ends the run as an error.

    Raises:
        ConfigError: a class has a method whose name begins with ``on_`` and is no hook's.

    Examples:
        >>> class Watch(jaxinfra.Callback):
        ...     def on_step(self, record):
        ...         if record["gradient_norm"] > 100:
        ...             print("large gradient at step", record["step"])
        >>> Watch().on_step({"step": 3, "gradient_norm": 250.0})  # as train calls it
        large gradient at step 3
    """

    def __init_subclass__(cls) -> None:
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                raise ConfigError(
                    f"{cls.__name__}.{name}: a callback has no hook of this name, so nothing would "
                    f"call it{nearest(name, hooks)}"
                )

    def on_begin(self, run: Path, config: RunConfig) -> None:
        """Called after set-up, before the session's first step.

        Args:
            run: the run's directory.
        """

    def on_step(self, record: Record) -> None:
        """Called after a step; ``record`` has its loss, learning rate, times and the statistics
        that layers emit.
        """

    def on_evaluation(self, record: Record) -> None:
        """Called after an evaluation; ``record`` has ``heldout_loss`` and
        ``heldout_bits_per_byte``.
        """

    def on_save(self, step: int) -> None:
        """Called when a checkpoint of this step begins to be written."""

    def on_end(self, summary: Record | None) -> None:
        """Called at the end of a session. ``summary`` is the content of ``summary.json``; None if
        the run was stopped before its last step.
        """


class MetricsLogger(Callback):
    """A callback that passes the numbers of every step and evaluation to one ``write`` method.

    Examples:
        >>> class Printer(jaxinfra.MetricsLogger):
        ...     def write(self, values, *, step):
        ...         print(step, dict(values))
        >>> Printer().on_step({"step": 3, "loss": 2.5})
        3 {'loss': 2.5}
    """

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Writes the numbers of one record; all values are floats or ints."""
        raise NotImplementedError

    def on_step(self, record: Record) -> None:
        """Writes the numbers of a training step's record."""
        self.write(_numbers(record), step=record["step"])

    def on_evaluation(self, record: Record) -> None:
        """Writes the numbers of an evaluation's record."""
        MetricsLogger.on_step(self, record)


def _numbers(record: Record) -> dict[str, float]:
    return {n: v for n, v in record.items() if n != "step" and isinstance(v, int | float)}


@final
class JsonLinesLogger(MetricsLogger):
    """A logger that appends one JSON object per line to a file.

    Examples:
        >>> logger = jaxinfra.JsonLinesLogger("log.jsonl")
        >>> logger.on_step({"step": 3, "loss": 2.5})
        >>> pathlib.Path("log.jsonl").read_text().strip()
        '{"step": 3, "loss": 2.5}'
    """

    def __init__(self, file: str | Path):
        self._file = Path(file)

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Appends the values as one line of JSON."""
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


@final
class TensorBoardLogger(MetricsLogger):
    """A logger of scalars into a TensorBoard directory.

    Examples:
        >>> logger = jaxinfra.TensorBoardLogger("events")
        >>> logger.on_step({"step": 3, "loss": 2.5})
        >>> logger.on_end(None)
    """

    def __init__(self, directory: str | Path):
        self._writer = SummaryWriter(str(directory))

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Adds one TensorBoard scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, summary: Record | None) -> None:
        """Closes the TensorBoard event files."""
        self._writer.close()


@final
class WandbLogger(MetricsLogger):
    """A logger for Weights & Biases; ``pip install wandb`` first.

    Args:
        options: keyword arguments of ``wandb.init``, such as ``project="ablations"``.

    Raises:
        ConfigError: wandb is not installed.

    Examples:
        >>> callbacks = [jaxinfra.WandbLogger(project="ablations")]  # for jaxinfra.train
    """

    def __init__(self, **options: Any):
        self._wandb, self._options = _optional("wandb"), options
        self._run: Any = None

    def on_begin(self, run: Path, config: RunConfig) -> None:
        """Begins a Weights & Biases run that holds this config."""
        named = {"name": run.name, **self._options}
        self._run = self._wandb.init(config=codec.to_dict(config), **named)

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Logs the values of a step to Weights & Biases."""
        self._run.log(dict(values), step=step)

    def on_end(self, summary: Record | None) -> None:
        """Ends the Weights & Biases run, with the run's summary."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=0)


@final
class MlflowLogger(MetricsLogger):
    """A logger for MLflow; ``pip install mlflow`` first.

    Args:
        options: keyword arguments of ``mlflow.start_run``, such as ``experiment_id="3"``.

    Raises:
        ConfigError: mlflow is not installed.

    Examples:
        >>> callbacks = [jaxinfra.MlflowLogger(experiment_id="3")]  # for jaxinfra.train
    """

    def __init__(self, **options: Any):
        self._mlflow, self._options = _optional("mlflow"), options

    def on_begin(self, run: Path, config: RunConfig) -> None:
        """Begins an MLflow run that holds this config."""
        self._mlflow.start_run(**{"run_name": run.name, **self._options})
        self._mlflow.log_dict(codec.to_dict(config), "config.json")

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Logs the values of a step to MLflow."""
        self._mlflow.log_metrics(dict(values), step=step)

    def on_end(self, summary: Record | None) -> None:
        """Ends the MLflow run."""
        self._mlflow.end_run("KILLED" if summary is None else "FINISHED")


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: pip install {name}") from error


STATISTICS_FILE = "statistics.jsonl"

_LOG = logging.getLogger(__name__)


class _Record(TypedDict):
    step: int


def _is_flat(record: dict[str, Any]) -> bool:
    kinds = float | str | list[float] | list[str] | None
    return all(is_of_type(value, kinds) for value in record.values())


@final
class MetricsLog:
    """Log of a run's records: one JSON line each in ``metrics.jsonl``, and the values as
    TensorBoard events.

    A number that is not finite is written as null: JSON has no NaN. Lines that cannot be written,
    as on a full disk, stay in memory until the next record; ``close`` raises if lines remain.

    Args:
        after_step: step at which a resumed run begins; lines of later steps are dropped, as these
            steps are run again.
        writes: whether this process writes files; False on all processes but the first.
        callbacks: called with each record, and at each save.
    """

    def __init__(
        self,
        file: Path,
        tensorboard: Path,
        *,
        after_step: int,
        writes: bool = True,
        callbacks: Sequence[Callback] = (),
    ):
        self._paths = (file, tensorboard)
        self._writes = writes
        self._callbacks = callbacks
        self.stopped: StopTraining | None = None  # by a callback
        found, damaged = read_log(file, holds=_Record)
        self.records = [record for record in found if _is_flat(record)]
        self.damaged = len(damaged) + len(found) - len(self.records)  # lines that are kept aside
        self.undone = self._keep(after_step)
        if writes:
            self._open(after_step)

    def _keep(self, after_step: int) -> list[dict[str, Any]]:
        undone = [record for record in self.records if record["step"] > after_step]
        self.records = [record for record in self.records if record["step"] <= after_step]
        return undone

    def rewind(self, after_step: int) -> list[dict[str, Any]]:
        """Drops and returns the records of all steps after ``after_step``, when the run rolls back
        to that step.
        """
        self.close()
        undone = self._keep(after_step)
        if self._writes:
            self._open(after_step)
        return undone

    def _open(self, after_step: int) -> None:
        file, tensorboard = self._paths
        partial = file.with_name(file.name + ".partial")
        partial.unlink(missing_ok=True)  # written through, a link would lead elsewhere
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        if self.damaged:
            number = 1 + len(list(file.parent.glob(f"{file.stem}.damaged-*{file.suffix}")))
            file.rename(file.with_name(f"{file.stem}.damaged-{number}{file.suffix}"))
            self.damaged = 0
        partial.rename(file)
        tensorboard.mkdir(exist_ok=True)
        self._lines = _Appender(file)
        self._statistics = _Appender(file.with_name(STATISTICS_FILE), opens_late=True)
        # Not SummaryWriter: it writes in a thread behind a bounded queue. On a full disk the thread
        # dies, and the step that fills the queue waits for ever.
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}"
        self._events = _Appender(tensorboard / name)
        self._add_event(Event(file_version="brain.Event:2"))
        # TensorBoard drops what an earlier session wrote from this step on.
        self._add_event(Event(step=after_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, which must have a ``step``, and calls the callbacks with it.

        If the record has ``statistics``, they are written to ``statistics.jsonl`` in the same
        directory. That file may have two lines for a step that was repeated; the later one counts.
        """
        record = finite(record)
        statistics = record.pop("statistics", None)
        self.records.append(record)
        if not self._writes:
            return
        self._lines.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        numbers = _numbers(record)
        if statistics is not None:
            line = {"step": record["step"], **statistics}
            self._statistics.append(json.dumps(line, allow_nan=False).encode() + b"\n")
            numbers |= flat_statistics(statistics)
        for name, value in numbers.items():
            self._add_event(Event(step=record["step"], summary=scalar(name, value)))
        self._call("on_evaluation" if "heldout_loss" in record else "on_step", record)

    def report_save(self, step: int) -> None:
        """Tells callbacks that a checkpoint of this step begins to be written."""
        self._call("on_save", step)

    def _call(self, hook: str, told: Any) -> None:
        for callback in self._callbacks:
            try:
                getattr(callback, hook)(told)
            except StopTraining as stop:  # the others are still told
                self.stopped = self.stopped or stop

    def _add_event(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
        self._events.append(size + sums[0] + data + sums[1])

    def sync(self) -> None:
        """Forces the log's lines to disk. Called before each checkpoint, so that the log has every
        step that the checkpoint contains.
        """
        if self._writes:
            self._lines.sync()

    def find(self, name: str, *, step: int | None = None) -> dict[str, Any] | None:
        """Returns the newest record that has a value named ``name``; with ``step``, only of that
        step.
        """
        for record in reversed(self.records):
            if step is not None and record["step"] < step:
                break
            if name in record and step in (None, record["step"]):
                return record
        return None

    def close(self) -> None:
        """Closes ``metrics.jsonl`` and ``statistics.jsonl``; raises OSError if lines could not be
        written.
        """
        if not self._writes:
            return
        lost_events = self._events.close()
        lost_lines = self._statistics.close() or self._lines.close()
        if lost_lines is not None:
            raise lost_lines
        if lost_events is not None:
            _LOG.warning("%s: the last events are lost", lost_events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # otherwise that error matters more
                raise


@final
class _Appender:
    """A file to which what a full disk refuses is appended later, in order and once.

    Args:
        opens_late: made with its first line.
    """

    def __init__(self, path: Path, *, opens_late: bool = False):
        self._path = path
        # Unbuffered: of every write it is known how much arrived.
        self._file = None if opens_late else path.open("ab", buffering=0)
        self._waiting = b""

    def append(self, data: bytes) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += data
        error = self._catch_up()
        if error is not None and not was_waiting:
            _LOG.warning("%s; kept in memory until it can be written", error)

    def sync(self) -> None:
        if self._file is not None and not self._waiting:
            os.fsync(self._file.fileno())

    def close(self) -> OSError | None:
        """Returns why something is lost, if something is."""
        error = self._catch_up()
        if self._file is not None:
            self._file.close()
        return error

    def _catch_up(self) -> OSError | None:
        try:
            while self._waiting:
                self._file = self._file or self._path.open("ab", buffering=0)
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            error.filename = str(self._path)
            return error
        return None


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with None for each float that is NaN or infinite: JSON has neither."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
