"""The watchdog of a rank: it ends a job that hangs, and reports the rank that the others wait for.

Twice a second its thread updates the heartbeat in its rank's recorder, and checks the phase of its
own process and the heartbeat of the next rank. The first watchdog to find a bound exceeded writes
``trip.json``; every watchdog that sees the file dumps its process's stacks. The first then writes
``report.txt``, which names the absent rank and its phase, and all exit with ``HUNG_EXIT``.

A rank that waits for other ranks is in the phase ``wait``: it has handed its work to the devices.
The absent rank is in another phase, or at an earlier step, or does not run at all.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self, final

from jaxinfra.errors import ConfigError, LostPeerError
from jaxinfra.runtime.files import read_bytes, whole_number
from jaxinfra.runtime.recorder import (
    RankRecord,
    Recorder,
    describe_events,
    read_record,
    read_records,
    record_file,
)

# The order within a step; whoever is furthest behind is waited for.
_ORDER = {"input": 0, "place": 1, "compile": 2, "step": 2, "wait": 3, "evaluate": 4, "save": 5}
ENDED = ("done",)


def find_absent(
    records: Sequence[RankRecord], *, num_ranks: int, not_running: Collection[int] = (), now: float
) -> str:
    """Names the ranks that the other ranks wait for, and the phase that each of them is in.

    Args:
        not_running: ranks whose heartbeat has stopped: the process or its host is stopped or dead.
        now: wall time in seconds.
    """
    there = {record.rank: record for record in records}
    unseen = [rank for rank in range(num_ranks) if rank not in there]
    if unseen:
        return f"{_ranks(unseen)} never began to record"
    if not_running:
        return "; ".join(
            f"rank {rank} does not run: its process is stopped, dead or cut off, last in "
            f"{_where(there[rank])}"
            for rank in sorted(not_running)
        )
    places = {record.rank: _place(record) for record in records if record.phase not in ENDED}
    behind = min(places.values(), default=(0, 0))
    absent = sorted(rank for rank, place in places.items() if place == behind)
    if len(absent) == num_ranks:
        text = f"no rank is behind: all {num_ranks} are in {_where(there[absent[0]])}"
        return f"{text}; a device or a link between them stands still"
    others = [there[rank] for rank in sorted(places) if rank not in absent]
    waiting = (
        f"; {_ranks([record.rank for record in others])} in {_where(others[0])}" if others else ""
    )
    text = "; ".join(
        f"rank {rank} is absent: for {now - there[rank].since:.0f} s in {_where(there[rank])}"
        for rank in absent
    )
    return text + waiting


def _place(record: RankRecord) -> tuple[int, int]:
    return record.step, _ORDER.get(record.phase, -1)


def _where(record: RankRecord) -> str:
    return f"{record.phase} of step {record.step}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


HUNG_EXIT = LostPeerError.exit_code
TRIP, REPORT = "trip.json", "report.txt"
_REPORT_BYTES = 64 << 20
_POLL_S = 0.5
_STACKS_S = 4.0  # time for the others to dump
# What may rightly take long. Several ranks may compile one after another.
_LONG_PHASES = ("setup", "compile", "save", "rollback", "finish")
_LONG_S = 3600.0
_LAST_EVENTS = 12
_LONG_HEARTBEAT_S = 120.0  # there a library may keep Python's threads waiting


@final
class Watchdog:
    """Context manager that watches this rank's process, and ends it if the job hangs.

    Args:
        directory: directory of all ranks' flight recorders.
        hang_s: longest time in seconds that a phase of a step may last.
        heartbeat_s: longest time in seconds that a process may miss its heartbeat.
        launcher: process that started this one; when it is gone, the run is asked to stop.
    """

    def __init__(
        self,
        recorder: Recorder,
        directory: Path,
        *,
        num_ranks: int,
        hang_s: float,
        heartbeat_s: float,
        launcher: int | None,
    ):
        self._recorder = recorder
        self._directory = directory
        self._num_ranks = num_ranks
        self._hang_s = hang_s
        self._heartbeat_s = heartbeat_s
        self._launcher = launcher
        self._end = threading.Event()
        self._next = (recorder.rank + 1) % num_ranks
        self._seen: tuple[int, float] = (0, time.monotonic())  # its beats, and since when
        self._stacks = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):  # a full disk: then without stacks
            self._stacks = stacks_file(self._directory, self._recorder.rank).open("w")
            # From outside, even while this process runs no Python.
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            self._stacks.close()

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            self._recorder.beat()
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            if (self._directory / TRIP).exists():
                self._follow()
            reason, not_running = self._trouble()
            if reason:
                self._lead(reason, not_running)

    def _trouble(self) -> tuple[str, list[int]]:
        recorder = self._recorder
        long = recorder.phase_name in _LONG_PHASES
        bound_s = max(_LONG_S, self._hang_s) if long else self._hang_s
        age_s = time.time() - recorder.since
        if age_s > bound_s and recorder.phase_name not in ENDED:
            what = f"{recorder.phase_name} of step {recorder.step}"
            return f"rank {recorder.rank} is in {what} for {age_s:.0f} s (bound {bound_s:g} s)", []
        if self._num_ranks > 1 and self._next_stands_still():
            return f"rank {self._next} gives no sign of life", [self._next]
        return "", []

    def _next_stands_still(self) -> bool:
        record = read_record(record_file(self._directory, self._next))
        now = time.monotonic()
        if record is None or record.phase in ENDED or record.beats != self._seen[0]:
            self._seen = (0 if record is None else record.beats, now)
            return False
        bound_s = self._heartbeat_s
        if record.phase in _LONG_PHASES:
            bound_s = max(bound_s, _LONG_HEARTBEAT_S)
        return now - self._seen[1] > bound_s

    def _lead(self, reason: str, not_running: list[int]) -> None:
        trip = {"rank": self._recorder.rank, "reason": reason, "time": time.time()}
        try:
            with (self._directory / TRIP).open("x") as file:
                json.dump(trip, file)
        except FileExistsError:
            self._follow()
        except OSError:
            pass  # a full disk: the others' own bounds will tell them
        self._dump()
        self._ask_those_that_run_no_python(skip=not_running)
        records = read_records(self._directory)
        now = time.time()
        verdict = find_absent(records, num_ranks=self._num_ranks, not_running=not_running, now=now)
        lines = [verdict, f"noticed by rank {self._recorder.rank}: {reason}", ""]
        for record in records:
            lines.append(
                f"rank {record.rank} on {record.host}, process {record.pid}: {record.phase} of "
                f"step {record.step} for {now - record.since:.1f} s, "
                f"last beat {now - record.beat_time:.1f} s ago; "
                f"stacks in {stacks_file(self._directory, record.rank)}"
            )
            lines += [f"    {line}" for line in describe_events(record, last=_LAST_EVENTS)]
        with contextlib.suppress(OSError):
            (self._directory / REPORT).write_text("\n".join(lines) + "\n")
        print(f"jaxinfra watchdog: {verdict}; see {self._directory / REPORT}", file=sys.stderr)
        self._abort()

    def _ask_those_that_run_no_python(self, *, skip: list[int]) -> None:
        """Waits for the others' stacks; asks through a signal for those that do not come."""
        for asked in (False, True):
            deadline = time.monotonic() + _STACKS_S / 2
            while (late := self._without_stacks(skip)) and time.monotonic() < deadline:
                time.sleep(0.1)
            for record in late:
                here = record.host == socket.gethostname()[:32]
                if not asked and here:
                    with contextlib.suppress(OSError):
                        os.kill(record.pid, signal.SIGUSR1)

    def _without_stacks(self, skip: Collection[int]) -> list[RankRecord]:
        return [
            record
            for record in read_records(self._directory)
            if record.phase not in ENDED
            and record.rank not in skip
            and not _size(stacks_file(self._directory, record.rank))
        ]

    def _follow(self) -> None:
        self._dump()
        deadline = time.monotonic() + 2 * _STACKS_S
        while not (self._directory / REPORT).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._abort()

    def _dump(self) -> None:
        if self._stacks is not None:
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _abort(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(HUNG_EXIT)


def read_report(directory: Path) -> str | None:
    """Returns the first line of the watchdog's report; None if there is none."""
    file = directory / REPORT
    if not file.exists():
        return None
    try:
        lines = read_bytes(file, limit=_REPORT_BYTES).decode(errors="replace").splitlines()
    except ConfigError as error:
        return str(error)
    return lines[0] if lines else "nothing"


def stacks_file(directory: Path, rank: int) -> Path:
    """Returns the file into which a rank's stack traces are dumped."""
    return directory / f"rank-{rank:05d}.stacks"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def launcher_of(environment: Mapping[str, str], name: str) -> int | None:
    """Returns the parent process's id if it is jaxinfra's launcher, else None."""
    number = whole_number(environment.get(name, ""))
    return number if number == os.getppid() else None
