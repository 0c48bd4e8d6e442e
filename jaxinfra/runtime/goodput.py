"""The ledger of a run's wall time: seconds by cause, over all its sessions.

``goodput.jsonl`` holds snapshots of the sessions; only the last line of each session counts.
``metrics.prom`` holds the sums as a Prometheus text file, for a node exporter's textfile collector.

The causes are setup, compile, compute, input, evaluate, checkpoint, rollback and other. Restart is
the time from one session's last snapshot to the next session's start. Lost compute is the time of
steps that a kill or a roll-back undid.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, final

from jaxinfra.runtime.files import read_log

# The recorder's phases; what is not here is "other".
_CAUSES = {
    "setup": "setup",
    "restore": "setup",
    "compile": "compile",
    "input": "input",
    "place": "compute",
    "step": "compute",
    "wait": "compute",
    "evaluate": "evaluate",
    "save": "checkpoint",
    "rollback": "rollback",
}
CAUSES = (*dict.fromkeys(_CAUSES.values()), "other", "restart", "lost")
_EVERY_S = 2.0


@final
class Goodput:
    """The ledger of one session's wall time by cause; process 0 keeps it.

    Args:
        began: wall time of the session's start.
        lost_s: compute seconds of the last session's steps that this session repeats.
    """

    def __init__(self, file: Path, prometheus: Path, *, began: float, lost_s: float):
        self._file, self._prometheus = file, prometheus
        self._before = read_sessions(file)
        last = self._before[-1]["time"] if self._before else began
        self._session = 1 + len(self._before)
        self._began = began
        self._restart_s = max(0.0, began - last)
        self.lost_s = lost_s
        self._written = 0.0

    def snapshot(
        self, spent: Mapping[str, float], *, step: int, gauges: Mapping[str, float], now: bool
    ) -> None:
        """Writes a snapshot of the ledger, at most every two seconds unless ``now``.

        If the disk is full, snapshots are dropped and the run continues.
        """
        if not now and time.monotonic() - self._written < _EVERY_S:
            return
        self._written = time.monotonic()
        seconds = dict.fromkeys(CAUSES, 0.0)
        for phase, value in spent.items():
            seconds[_CAUSES.get(phase, "other")] += value
        # What was computed in vain took place in the session before, and is moved from there.
        seconds["restart"], seconds["lost"] = self._restart_s, self.lost_s
        line = {
            "session": self._session,
            "began": self._began,
            "time": time.time(),
            "step": step,
            "seconds": {cause: round(value, 6) for cause, value in seconds.items()},
        }
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            total = sum_causes([*self._before, line])
            _write(self._prometheus, prometheus_text(total, step=step, gauges=gauges))
        except OSError:
            return


class _Snapshot(TypedDict):
    session: int
    began: float
    time: float
    step: int
    seconds: dict[str, float]


def read_sessions(file: Path) -> list[dict[str, Any]]:
    """Reads the last snapshot of every session, in order; damaged lines are left out."""
    lines, _ = read_log(file, holds=_Snapshot)
    sessions = {line["session"]: line for line in lines if set(line["seconds"]) <= set(CAUSES)}
    return [sessions[number] for number in sorted(sessions)]


def sum_causes(sessions: list[dict[str, Any]]) -> dict[str, float]:
    """Sums seconds by cause over all sessions; lost compute is subtracted from compute."""
    total = dict.fromkeys(CAUSES, 0.0)
    for session in sessions:
        for cause, seconds in session["seconds"].items():
            total[cause] += seconds
    total["compute"] = max(0.0, total["compute"] - total["lost"])
    return total


def goodput(total: Mapping[str, float]) -> float | None:
    """Returns goodput: the fraction of wall time spent computing steps that were not lost."""
    whole = sum(total.values())
    return total["compute"] / whole if whole else None


def prometheus_text(total: Mapping[str, float], *, step: int, gauges: Mapping[str, float]) -> str:
    """Formats the ledger in Prometheus' text exposition format, version 0.0.4."""
    lines = [
        "# HELP jaxinfra_run_seconds_total Wall time of the run by cause.",
        "# TYPE jaxinfra_run_seconds_total counter",
        *(f'jaxinfra_run_seconds_total{{cause="{c}"}} {total[c]:.3f}' for c in CAUSES),
        "# HELP jaxinfra_step Optimizer steps done.",
        "# TYPE jaxinfra_step gauge",
        f"jaxinfra_step {step}",
    ]
    for name, value in gauges.items():
        lines += [f"# TYPE jaxinfra_{name} gauge", f"jaxinfra_{name} {value:g}"]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)
