"""The flight recorder of a rank, in a mapped file that outlives it, and the log of incidents.

A ring buffer holds the last 2,048 events; a header holds the present step and phase. An event costs
about a microsecond and no system call, and the kernel keeps the written pages of a killed process.
Every rank's file may be read at any time.

Incidents (``incidents.jsonl``, one line each) are kept over resumptions and roll-backs. A resumed
run reads from them which batches were excluded since its checkpoint, and excludes them again; the
checkpoint itself lists earlier ones.

Layout, little endian: header ``_HEADER`` padded to 128 bytes, then events ``_EVENT``.
"""

import dataclasses
import json
import logging
import math
import mmap
import os
import socket
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, TypedDict, final

from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import drop_cut_line, read_bytes, read_log

_MAGIC = b"JXRING01"
# magic, rank, pid, events so far, beats so far, wall time of the last beat, step, phase's begin,
# phase, host
_HEADER = struct.Struct("<8sIIQQdqd24s32s")
_HEADER_BYTES = 128
_EVENT = struct.Struct("<ddq24s")  # wall time, value, step, name
CAPACITY = 2048
READY_BATCHES = "batches ready"
"""An event before each step; its value is their number."""
BUSY_READERS = "readers busy"
"""An event of a step for which no batch was ready; its value is the share of its readers' time in
which they computed, or stood in the queue of a processor.
"""
_FILE_BYTES = _HEADER_BYTES + CAPACITY * _EVENT.size
_EVENTS_AT, _BEATS_AT, _NOW_AT = 16, 24, 40
_NOW = struct.Struct("<qd24s")

_TIMES_END = 1 << 35  # of the wall clock; a damaged file may say any time

_log = logging.getLogger(__name__)


def record_file(directory: Path, rank: int) -> Path:
    """Returns the path of a rank's flight-recorder file."""
    return directory / f"rank-{rank:05d}.ring"


@final
class Recorder:
    """Writer of one rank's ring buffer of events; ``spent`` holds the seconds of each phase so far.

    If the disk of its directory is full, it records in memory and warns.
    """

    def __init__(self, directory: Path, rank: int):
        self.rank = rank
        self.spent: dict[str, float] = defaultdict(float)
        size = _FILE_BYTES
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with record_file(directory, rank).open("w+b") as file:
                # Room for all of it now: a full disk would kill the process at a write later.
                os.posix_fallocate(file.fileno(), 0, size)
                self._ring = mmap.mmap(file.fileno(), size)
        except OSError as error:
            _log.warning("%s: no flight recorder there (%s)", directory, error.strerror)
            self._ring = mmap.mmap(-1, size)
        host = socket.gethostname().encode()[:32]
        self._events = self._beats = 0
        self.phase_name, self.step, self.since = "setup", 0, time.time()
        self.began = self._began = time.perf_counter()
        self._phase_s = 0.0  # of the present phase, up to its last call
        now = (0, 0, self.since, 0, self.since, b"setup")
        _HEADER.pack_into(self._ring, 0, _MAGIC, rank, os.getpid(), *now, host)
        self.event("setup", step=0)

    def event(self, name: str, *, step: int, value: float = 0.0) -> None:
        """Records an event of a step, with its name and a value."""
        at = _HEADER_BYTES + self._events % CAPACITY * _EVENT.size
        _EVENT.pack_into(self._ring, at, time.time(), value, step, name.encode()[:24])
        self._events += 1
        struct.pack_into("<Q", self._ring, _EVENTS_AT, self._events)

    def phase(self, name: str, *, step: int) -> float:
        """Begins a phase; records and returns the seconds of the previous phase.

        A phase that begins again at once, as an evaluation does with each batch, stays one event.
        """
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.spent[self.phase_name] += seconds
        self._phase_s += seconds
        is_again = (name, step) == (self.phase_name, self.step)
        self.phase_name, self.step, self.since = name, step, time.time()
        _NOW.pack_into(self._ring, _NOW_AT, step, self.since, name.encode()[:24])
        if not is_again:
            self.event(name, step=step, value=self._phase_s)
            self._phase_s = 0.0
        return seconds

    def beat(self) -> None:
        """Updates the heartbeat of this process; the watchdog's thread calls it."""
        self._beats += 1
        struct.pack_into("<Qd", self._ring, _BEATS_AT, self._beats, time.time())

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent in each phase so far, the present one included."""
        now = time.perf_counter() - self._began
        return {**self.spent, self.phase_name: self.spent[self.phase_name] + now}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event of a flight recorder. If it begins a phase, ``value`` is the previous phase's
    seconds.
    """

    time: float
    name: str
    step: int
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """The contents of a rank's flight-recorder file."""

    rank: int
    pid: int
    host: str
    beats: int
    beat_time: float  # wall clock of that host
    phase: str
    since: float
    step: int
    events: tuple[Event, ...]  # oldest first


def read_record(file: Path) -> RankRecord | None:
    """Reads a rank's flight-recorder file; None if it is not one, or not yet complete."""
    try:
        data = read_bytes(file, limit=_FILE_BYTES)
    except ConfigError:
        return None
    if len(data) < _FILE_BYTES or not data.startswith(_MAGIC):
        return None
    _, rank, pid, count, beats, beat_time, step, since, phase, host = _HEADER.unpack_from(data)
    events = []
    for number in range(max(0, count - CAPACITY), count):
        at = _HEADER_BYTES + number % CAPACITY * _EVENT.size
        when, value, of_step, name = _EVENT.unpack_from(data, at)
        events.append(
            Event(time=_finite(when), name=_text(name), step=of_step, value=_finite(value))
        )
    return RankRecord(
        rank=rank,
        pid=pid,
        host=_text(host),
        beats=beats,
        beat_time=_finite(beat_time),
        phase=_text(phase),
        since=_finite(since),
        step=step,
        events=tuple(events),
    )


def describe_events(record: RankRecord, *, last: int) -> list[str]:
    """Formats a rank's newest events, oldest first, one per line: time, step, name and value.

    The value of a phase's event is the seconds of the phase before it.
    """
    lines = []
    for event in record.events[-last:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.time % _TIMES_END))
        lines.append(
            f"{at}.{int(event.time % 1 * 1000):03d}  step {event.step:<7d} {event.name:24s} "
            f"{event.value:.6g}"
        )
    return lines


def read_records(directory: Path) -> list[RankRecord]:
    """Reads the flight-recorder files of all ranks, by rank."""
    records = (read_record(file) for file in sorted(directory.glob("rank-*.ring")))
    return [record for record in records if record is not None]


def _finite(value: float) -> float:
    """The number; 0 for one that a damaged file has in its place."""
    return value if math.isfinite(value) else 0.0


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


EXCLUDED = "batch excluded"
RECOMPILED = "recompiled"  # a batch came in another shape


def record_incident(file: Path, kind: str, *, step: int, text: str, **details: Any) -> None:
    """Appends an incident's line and forces it to disk, so that it survives whatever follows."""
    line = {"kind": kind, "step": step, "text": text, "time": time.time(), **details}
    drop_cut_line(file)  # of a session that was killed
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_incidents(file: Path) -> list[dict[str, Any]]:
    """Reads all incidents of a run, oldest first; damaged lines are left out."""
    lines, _ = read_log(file, holds=_Incident)
    return lines


def excluded_steps(file: Path) -> set[int]:
    """Returns the steps whose batches were excluded, from the log of incidents."""
    return {line["step"] for line in read_incidents(file) if line["kind"] == EXCLUDED}


class _Incident(TypedDict):
    kind: str
    step: int
    text: str
