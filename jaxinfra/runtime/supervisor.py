"""The supervisor of a job's processes on this node: it starts, watches and restarts them.

Every rank writes to files of its own, so that the job outlives its supervisor's terminal; rank 0's
output and all errors are also shown. If a rank fails, the whole job is ended and restarted from its
newest checkpoint, as often and as fast as the limits allow.
"""

import dataclasses
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, final

from jaxinfra.runtime import cluster
from jaxinfra.runtime.recorder import RankRecord, read_record, record_file, record_incident
from jaxinfra.runtime.signals import RESUMABLE_EXIT, delegated_signals
from jaxinfra.runtime.watchdog import read_report

RANK_ENDED = "rank ended"  # the kind of such incidents
_FATAL = (1, 2)  # a restart would end in the same failure
# Where a peer goes, the others end so: by JAX's own abort, or by our word for it. A rank that ended
# otherwise was there first.
_CONSEQUENCES = (74, -signal.SIGABRT)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Exit code or signal with which the process of a rank ended."""

    rank: int
    code: int  # minus the signal's number where one ended it
    order: int  # 0 for the process that was seen to end first, then 1, ...
    killed_by_us: bool = False
    stopped: bool = False  # its process was halted by a signal when it was killed

    @property
    def exit_code(self) -> int:
        """Exit code of the process as a shell reports it."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        """Describes how the process ended in words."""
        if self.stopped:
            return f"rank {self.rank} was halted (SIGSTOP, or a debugger)"
        if self.code < 0:
            name = signal.Signals(-self.code).name
            return f"rank {self.rank} was ended by {name} (exit {self.exit_code})"
        meaning = {
            0: "ended normally",
            1: "failed",
            2: "was used wrongly",
            74: "lost another rank",
            RESUMABLE_EXIT: "was asked to stop",
        }.get(self.code, "failed")
        return f"rank {self.rank} {meaning} (exit {self.code})"


def first_failure(endings: list[Ending]) -> Ending | None:
    """Returns the ending of the rank whose failure made the others fail."""
    failed = [end for end in endings if end.code != 0 and not end.killed_by_us]
    halted = [end for end in endings if end.stopped]
    return min(
        halted or failed,
        key=lambda end: (end.code in _CONSEQUENCES and not end.stopped, end.order),
        default=None,
    )


def is_halted(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped this process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def own_memory_group(root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Returns this process's memory cgroup, of version 2 or 1; None if it has none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            candidates = [root / "memory" / path.lstrip("/"), root / "memory"]
        elif not controllers:
            candidates = [root / path.lstrip("/"), root]
        else:
            continue
        for candidate in candidates:
            if count_memory_kills(candidate) is not None:
                return candidate
    return None


def count_memory_kills(group: Path | None) -> int | None:
    """Returns how many processes of a cgroup the kernel's OOM killer has ended; None if unknown."""
    if group is None:
        return None
    for name in ("memory.events", "memory.oom_control"):
        try:
            match = re.search(r"^oom_kill (\d+)$", (group / name).read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return None


@final
class Tail:
    """Copies whole lines of a growing file to a stream."""

    def __init__(self, file: Path, stream: TextIO, *, prefix: str):
        self._file, self._stream, self._prefix = file, stream, prefix
        self._at = 0

    def show(self) -> None:
        """Copies the lines that were written since the last call."""
        with self._file.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        end = data.rfind(b"\n") + 1
        if not end:
            return
        self._at += end
        for line in data[:end].decode(errors="replace").splitlines():
            self._stream.write(f"{self._prefix}{line}\n")
        self._stream.flush()


def last_line(file: Path) -> str:
    """Returns a file's last line that is not blank; empty if there is none."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


_POLL_S = 0.05
# After the first failure the others may still say what they saw.
_SETTLE_S = 2.0
# A watchdog's report takes the others' stacks first.
_REPORT_S = 15.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on how often and how fast a job is restarted, and how long it may take to stop."""

    max_restarts: int = 3
    backoff_s: float = 1.0  # doubled with every restart
    longest_backoff_s: float = 60.0
    grace_s: float = 60.0  # from the signal to the kill


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeRanks:
    """Ranks of this node's processes and the job's coordinator; by default the node is the job."""

    host: str = "127.0.0.1"
    port: int | None = None  # None: a free one
    first_rank: int = 0
    num_ranks: int | None = None  # None: the processes of this node


@final
class Supervisor:
    """Runs ``command`` in ``num_processes`` processes here, and restarts them after failures.

    Args:
        command: command line of the first start.
        again: command line of restarts, which resume the run.
        logs: directory for the processes' output and for ``report.json``.
        recorder: directory of the ranks' flight recorders, if they have some.
        incidents: log of the run's incidents, to which failures of ranks are added.
        environment: environment variables of the processes, to which their ranks are added.
        memory_group: cgroup whose count of OOM kills shows that a process was killed for memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_processes: int,
        again: Sequence[str],
        logs: Path,
        recorder: Path | None,
        incidents: Path | None,
        limits: Limits,
        place: NodeRanks,
        environment: Mapping[str, str],
        memory_group: Path | None = None,
    ):
        self._command, self._again = list(command), list(again)
        self._num = num_processes
        self._logs, self._recorder, self._incidents = logs, recorder, incidents
        self._limits, self._place = limits, place
        self._environment = dict(environment)
        self._memory_group = memory_group or own_memory_group()
        self._asked: signal.Signals | None = None
        self._deadline: float | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._tails: list[Tail] = []
        self._attempts: list[dict[str, Any]] = []
        known = cluster.TOKEN in environment or cluster.TOKEN_FILE in environment
        # Launchers of other nodes could not know one that is drawn here.
        is_alone = place.num_ranks in (None, num_processes)
        self._secret = {cluster.TOKEN: secrets.token_hex(16)} if is_alone and not known else {}

    @property
    def was_asked(self) -> bool:
        """Whether a signal has asked the job to stop."""
        return self._asked is not None

    def run(self) -> int:
        """Runs the job until it ends, stops or fails for good; returns its exit code."""
        handlers = {
            number: signal.signal(number, self._forward)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            with delegated_signals():
                return self._run()
        finally:
            self._kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        self._logs.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            code = self._attempt(number)
            if code in (0, RESUMABLE_EXIT) or self._asked is not None:
                return code
            cause, wait_s = self._attempts[-1], None
            if cause["fatal"]:
                then = "starting it again would not help"
            elif number == self._limits.max_restarts:
                then = f"given up after {number} restarts"
            else:
                wait_s = min(self._limits.longest_backoff_s, self._limits.backoff_s * 2**number)
                then = f"restart {number + 1} of {self._limits.max_restarts} in {wait_s:g} s"
            self._tell_run(cause, then, restart=None if wait_s is None else number + 1)
            self._say(f"{cause['text']}; {then}")
            if wait_s is None:
                return code
            number += 1
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                time.sleep(_POLL_S)
                if self._asked is not None:
                    return RESUMABLE_EXIT  # nothing runs, the newest checkpoint is whole

    def _attempt(self, number: int) -> int:
        """Starts all processes and waits for all of them; returns the job's exit code."""
        kills_before = count_memory_kills(self._memory_group)
        self._start(number)
        endings = self._wait_for_all()
        for tail in self._tails:
            tail.show()
        failed = first_failure(endings)
        code = self._code(endings, failed)
        text = self._explain(number, endings, failed, kills_before)
        self._attempts.append(
            {
                "attempt": number,
                "exit": code,
                "first": None if failed is None else failed.rank,
                "fatal": failed is not None and failed.code in _FATAL,
                "text": text,
                "ranks": {str(end.rank): end.exit_code for end in endings},
            }
        )
        (self._logs / "report.json").write_text(json.dumps(self._attempts, indent=2) + "\n")
        if code == 128 + signal.SIGKILL and self._asked is not None:
            self._say(
                f"the grace of {self._limits.grace_s:g} s was not enough: killed; the run "
                "continues from its newest complete checkpoint"
            )
        return code

    def _tell_run(self, cause: Mapping[str, Any], then: str, *, restart: int | None) -> None:
        """Records in the run how its first rank ended, unless another node's launcher knows it."""
        first = cause["first"]
        is_other = cause["exit"] in (74, 128 + signal.SIGABRT) and self._place.num_ranks is not None
        # A job that fails before its run begins leaves nothing behind.
        if first is None or self._incidents is None or not self._incidents.parent.is_dir():
            return
        if is_other:
            return
        record = self._record_of(first)
        details = {"rank": first, "exit": cause["exit"], "restart": restart}
        step = 0 if record is None else record.step
        try:
            text = f"{cause['text']}; {then}"
            record_incident(self._incidents, RANK_ENDED, step=step, text=text, **details)
        except OSError as error:
            self._say(f"{self._incidents}: {error.strerror}: the run's report will not say this")

    def _record_of(self, rank: int) -> RankRecord | None:
        return None if self._recorder is None else read_record(record_file(self._recorder, rank))

    def _code(self, endings: list[Ending], failed: Ending | None) -> int:
        asked = () if self._asked is None else (-self._asked, -signal.SIGTERM)
        if failed is not None and failed.code in asked:
            return RESUMABLE_EXIT  # asked before it could listen: it had done nothing yet
        if failed is not None:
            return failed.exit_code
        return 128 + signal.SIGKILL if any(end.killed_by_us for end in endings) else 0

    def _start(self, number: int) -> None:
        place = self._place
        port = place.port if place.port is not None else cluster.free_port()
        num_ranks = place.num_ranks or self._num
        self._tails = []
        for local in range(self._num):
            rank = place.first_rank + local
            base = self._logs / f"attempt-{number}.rank-{rank}"
            out, err = base.with_name(base.name + ".out"), base.with_name(base.name + ".err")
            environment = self._environment | {
                cluster.COORDINATOR: f"{place.host}:{port}",
                cluster.NUM_PROCESSES: str(num_ranks),
                cluster.PROCESS_ID: str(rank),
                cluster.LOCAL_ID: str(local),
                cluster.NUM_LOCAL: str(self._num),
                cluster.ATTEMPT: str(number),
                cluster.LAUNCHER: str(os.getpid()),
                **self._secret,
            }
            with out.open("wb") as stdout, err.open("wb") as stderr:
                self._children[rank] = subprocess.Popen(
                    self._command if number == 0 else self._again,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    # Ctrl-C on a terminal reaches us alone; we pass it on once.
                    process_group=0,
                )
            if rank == 0:
                self._tails.append(Tail(out, sys.stdout, prefix=""))
            self._tails.append(Tail(err, sys.stderr, prefix=f"[rank {rank}] "))

    def _wait_for_all(self) -> list[Ending]:
        endings: list[Ending] = []
        give_up: float | None = None
        halted: set[int] = set()
        while self._children:
            ended = {
                rank: child for rank, child in self._children.items() if child.poll() is not None
            }
            for rank, child in sorted(ended.items()):
                del self._children[rank]
                assert child.returncode is not None
                end = Ending(
                    rank=rank, code=child.returncode, order=len(endings), stopped=rank in halted
                )
                endings.append(end)
                if end.code == RESUMABLE_EXIT and self._asked is None and self._deadline is None:
                    self._ask_all(signal.SIGTERM)  # it was asked alone, before they could agree
                elif end.code not in (0, RESUMABLE_EXIT) and give_up is None:
                    wait_s = _REPORT_S if end.code == 74 else _SETTLE_S
                    give_up = time.monotonic() + wait_s
            for tail in self._tails:
                tail.show()
            late = self._deadline is not None and time.monotonic() > self._deadline
            if self._children and (late or (give_up is not None and time.monotonic() > give_up)):
                halted = {r for r, child in self._children.items() if is_halted(child.pid)}
                endings += self._end_rest(halted, order=len(endings))
            time.sleep(_POLL_S)
        self._deadline = None
        return endings

    def _end_rest(self, halted: set[int], *, order: int) -> list[Ending]:
        rest = sorted(self._children)
        children = dict(self._children)
        self._kill()
        return [
            Ending(
                rank=rank,
                code=children[rank].returncode,
                order=order + position,
                killed_by_us=children[rank].returncode == -signal.SIGKILL,
                stopped=rank in halted,
            )
            for position, rank in enumerate(rest)
        ]

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
        self._children.clear()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._asked is not None and number == signal.SIGINT:
            self._deadline = 0.0  # somebody does not want to wait
        if self._asked is None:
            self._asked = signal.Signals(number)
            self._ask_all(self._asked)

    def _ask_all(self, number: signal.Signals) -> None:
        self._deadline = time.monotonic() + self._limits.grace_s
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _explain(
        self,
        number: int,
        endings: list[Ending],
        failed: Ending | None,
        kills_before: int | None,
    ) -> str:
        if failed is None:
            return "all ranks ended normally"
        parts = [f"{failed.describe()} first"]
        kills = count_memory_kills(self._memory_group)
        if failed.code == -signal.SIGKILL and kills is not None and kills_before is not None:
            if kills > kills_before:
                parts.append(
                    f"the kernel killed it for host memory ({kills - kills_before} kills for "
                    f"memory in {self._memory_group}): fewer loader threads, smaller prefetch, or "
                    "more memory a node"
                )
            else:
                parts.append("not by the kernel for memory")
        report = None if self._recorder is None else read_report(self._recorder)
        if report is not None:
            parts.append(report)
        elif said := last_line(self._logs / f"attempt-{number}.rank-{failed.rank}.err"):
            parts.append(f"it said: {said}")
        record = self._record_of(failed.rank)
        if record is not None:
            parts.append(f"last recorded in {record.phase} of step {record.step}")
        others = [end.describe() for end in endings if end.rank != failed.rank]
        if others:
            parts.append(f"then {', '.join(others)}")
        return "; ".join(parts)

    def _say(self, text: str) -> None:
        print(f"jaxinfra launch: {text}", file=sys.stderr, flush=True)
