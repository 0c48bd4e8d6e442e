"""What a run records: ``metrics.jsonl``, and the same values as TensorBoard events."""

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, Self, final

# Not SummaryWriter: it writes in a thread behind a bounded queue. On a full disk that thread dies,
# and the training step that fills the queue waits for ever.
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore  (made at import)
from tensorboardX.summary import scalar

from jaxinfra.core.errors import CheckpointError

_LOG = logging.getLogger(__name__)


@final
class MetricsLog:
    """Appends one JSON line a record, handed to the system at once, and the values as events.

    What is not a finite number is written as null: JSON has no NaN. Where a line cannot be written,
    as on a full disk, it is kept in memory and tried again with the next one; ``close`` raises if
    lines remain.

    Args:
        after_step: a resumed run repeats what came after this step, so later lines are dropped.
    """

    def __init__(self, file: Path, tensorboard: Path, *, after_step: int):
        self.records = [record for record in read_metrics(file) if record["step"] <= after_step]
        partial = file.with_name(file.name + ".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        partial.rename(file)
        self._path = file
        self._file = file.open("ab", buffering=0)
        self._unwritten = b""
        self._events = _Events(tensorboard, first_step=after_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record; it must have a ``step``."""
        record = finite(record)
        self.records.append(record)
        was_behind = bool(self._unwritten)
        self._unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
        error = self._catch_up()
        if error is not None and not was_behind:
            _LOG.warning(
                "%s: %s; lines are kept in memory until they can be written",
                self._path,
                error.strerror,
            )
        self._events.write(record)

    def sync(self) -> None:
        """Forces the lines to the disk: before a checkpoint, so that it never has fewer of them."""
        if not self._unwritten:
            os.fsync(self._file.fileno())

    def find(self, name: str, *, step: int | None = None) -> dict[str, Any] | None:
        """The newest record with a value of that name (of that step)."""
        for record in reversed(self.records):
            if step is not None and record["step"] < step:
                break
            if name in record and step in (None, record["step"]):
                return record
        return None

    def close(self) -> None:
        """Closes both logs; raises OSError if lines could not be written."""
        error = self._catch_up()
        self._file.close()
        self._events.close()
        if error is not None:
            error.filename = str(self._path)
            raise error

    def _catch_up(self) -> OSError | None:
        try:
            while self._unwritten:
                # Unbuffered: what a full disk took is counted, so that no half line is repeated.
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            return error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # otherwise that error matters more
                raise


@final
class _Events:
    """TensorBoard's copy of the metrics: where it cannot be written, it ends with a warning."""

    def __init__(self, directory: Path, *, first_step: int):
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._writer: EventsWriter | None = EventsWriter(str(directory / "events"))
        # TensorBoard drops what an earlier session wrote from this step on.
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._add(Event(step=record["step"], summary=scalar(name, value)))

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._guard(writer.close)

    def _add(self, event: Event) -> None:
        writer = self._writer
        if writer is None:
            return
        event.wall_time = time.time()
        if not (self._guard(lambda: writer.write_event(event)) and self._guard(writer.flush)):
            self._writer = None  # the file ends in half an event: what followed could not be read

    def _guard(self, work: Any) -> bool:
        try:
            work()
        except OSError as error:
            _LOG.warning("%s: %s; no more TensorBoard events", self._directory, error.strerror)
            return False
        return True


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """The record with None for each float that JSON cannot hold."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All records of a run; a last line cut short by a kill is dropped."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(
                f"{file}, line {number} is not JSON ({error}); repair or remove that line"
            ) from error
    return records
