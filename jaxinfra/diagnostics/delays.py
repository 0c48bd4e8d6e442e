"""What delays a step, in the milliseconds that could be won at most, with what to do about each.

A wait of the host is an upper bound: only a device trace says how long devices worked meanwhile.
"""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.core.json_lines import read_log
from jaxinfra.diagnostics.waterfall import IDLE, Waterfall
from jaxinfra.reliability.incidents import RECOMPILED, read_incidents
from jaxinfra.reliability.recorder import RankRecord, read_records

_PHASES = ("input", "place", "step", "wait", "host", "compile", "evaluate", "save", "probe")
_ALONE = ("input", "place", "step")
"""Phases of a rank before its devices meet the others'."""
_SHARE = 0.02
"""Share of a step under which a cause is not worth a line."""
_INPUT_SHARE = 0.1
"""Share of a step that a wait takes at least to count: less is the queue's own time."""
_STALL_S = 1.0
"""Seconds of a save under which it is what every save takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """One cause, and what a step would gain without it at most."""

    cause: str
    ms: float  # per step
    text: str  # what was seen
    remedy: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A step's time and its delays, the largest first."""

    step_ms: float
    delays: tuple[Delay, ...]

    def paragraph(self) -> str:
        """The first thing ``jaxinfra trace`` says."""
        if not self.delays:
            return (
                f"A step takes {self.step_ms:.1f} ms, and nothing that could be avoided delays it."
            )
        won = [
            f"{each.ms:.1f} ms ({each.ms / self.step_ms:.0%}) to {each.cause}: {each.text}. "
            f"Remedy: {each.remedy}."
            for each in self.delays
        ]
        return f"A step takes {self.step_ms:.1f} ms. It loses " + " It loses ".join(won)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "step_ms": self.step_ms,
            "delays": [dataclasses.asdict(each) for each in self.delays],
        }


def explain_step(waterfall: Waterfall | None, directory: Path) -> Explanation | None:
    """What delays the step of a run: by its device trace, if there is one, and its own records.

    None where there is neither.
    """
    run = RunDirectory(directory)
    lines, _ = read_log(run.metrics_file, holds=dict[str, Any])
    steps = [line["step_s"] for line in lines if line.get("step_s")]
    step_ms = waterfall.span_ms if waterfall else 1e3 * statistics.median(steps) if steps else 0.0
    if not step_ms:
        return None
    found = [] if waterfall is None else device_delays(waterfall)
    found += host_delays(read_records(run.recorder), step_ms=step_ms, steps=len(steps))
    found += checkpoint_delays(lines, step_ms=step_ms)
    found += incident_delays(read_incidents(run.incidents_file), steps_ms=[1e3 * s for s in steps])
    if any(each.cause == "waiting for input" for each in found):  # which is why the device idles
        found = [each for each in found if each.cause != "host dispatch"]
    found.sort(key=lambda each: -each.ms)
    return Explanation(step_ms=step_ms, delays=tuple(found))


def device_delays(waterfall: Waterfall) -> list[Delay]:
    """Exposed communication by axis, and time in which the device has nothing to do."""
    least = _SHARE * waterfall.span_ms
    found = []
    by_axis = {axes: time.exposed_ms for axes, time in waterfall.by_axis.items()}
    if not by_axis:
        by_axis = {"devices": waterfall.by_kind().get("collective", 0.0)}
    for axes, ms in by_axis.items():
        if ms >= least:
            kernels = [each for each in waterfall.kernels if each.kind == "collective"]
            longest = kernels[0].hlo_op if kernels else "collectives"
            found.append(
                Delay(
                    cause=f"communication over {axes}",
                    ms=ms,
                    text=f"nothing runs beside it; the longest is {longest}",
                    remedy="set combine thresholds in training.xla_options, make micro-batches "
                    "larger, or lay this axis over faster links (jaxinfra plan)",
                )
            )
    idle = waterfall.by_kind().get(IDLE, 0.0)
    if idle >= 2 * least:
        found.append(
            Delay(
                cause="host dispatch",
                ms=idle,
                text="the device waits for its next launch",
                remedy="leave CUDA graphs on (xla_gpu_enable_command_buffer), free the host's "
                "cores, or give a step more tokens",
            )
        )
    copies = waterfall.by_kind().get("copy", 0.0)
    if copies >= 3 * least:
        found.append(
            Delay(
                cause="copies",
                ms=copies,
                text="arrays are copied between layouts or stacked over layers",
                remedy="unroll the layers (training.unroll)",
            )
        )
    return found


def phase_ms(record: RankRecord) -> dict[str, float]:
    """Milliseconds of each phase per step, over the steps that a rank's ring buffer holds whole.

    The first of them may have compiled, so that it does not count.
    """
    phases = [event for event in record.events if event.name in _PHASES]
    steps = sorted({event.step for event in phases})[1:-1]
    spent: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for begun, ended in itertools.pairwise(phases):
        if begun.step in steps:
            of_phase = spent[begun.name]
            of_phase[begun.step] = of_phase.get(begun.step, 0.0) + 1e3 * ended.value
    # The median: one step that saved or was interrupted tells of that alone.
    return {
        name: statistics.median([of_step.get(step, 0.0) for step in steps])
        for name, of_step in spent.items()
    }


def host_delays(
    records: Sequence[RankRecord], *, step_ms: float, steps: int, least_steps: int = 4
) -> list[Delay]:
    """Waiting for input, and ranks that the others wait for."""
    if steps < least_steps:
        return []
    phases = {record.rank: phase_ms(record) for record in records}
    phases = {rank: each for rank, each in phases.items() if each}
    if not phases:
        return []
    alone = {rank: sum(each.get(name, 0.0) for name in _ALONE) for rank, each in phases.items()}
    slowest = max(alone, key=alone.__getitem__)
    others = [ms for rank, ms in alone.items() if rank != slowest]
    behind = alone[slowest] - statistics.median(others) if others else 0.0
    if others and behind > _INPUT_SHARE * step_ms:
        mine = phases[slowest]
        where = max(_ALONE, key=lambda name: mine.get(name, 0.0))
        what = {"input": "waiting for its input", "place": "placing its batch"}
        return [
            Delay(
                cause=f"rank {slowest}, which is slow",
                ms=behind,
                text=f"it spends {mine.get(where, 0.0):.0f} ms "
                f"{what.get(where, 'handing steps to its devices')}, and all wait for it",
                remedy="look at its loader and disk"
                if where == "input"
                else "look at what else runs on its host, or give the job another node",
            )
        ]
    waiting = statistics.median(each.get("input", 0.0) for each in phases.values())
    ahead = statistics.median(each.get("wait", 0.0) for each in phases.values())
    # While the host waits for its devices, it may as well wait for a batch.
    if waiting > _INPUT_SHARE * step_ms and waiting > ahead:
        return [
            Delay(
                cause="waiting for input",
                ms=min(waiting, step_ms),
                text="no batch is ready when the step could begin",
                remedy="raise data.num_prefetch_threads and data.prefetch_batches, or read from a "
                "faster disk",
            )
        ]
    return []


def checkpoint_delays(lines: Sequence[Mapping[str, Any]], *, step_ms: float) -> list[Delay]:
    """Saves for which steps stood still, spread over all steps."""
    stalls = [line["stall_s"] for line in lines if line.get("stall_s")]
    steps = sum("step_s" in line for line in lines)
    ms = 1e3 * sum(stalls) / max(steps, 1)
    # A job of a few steps saves at its end alone.
    if len(stalls) < 2 or ms < _INPUT_SHARE * step_ms or statistics.median(stalls) < _STALL_S:
        return []
    return [
        Delay(
            cause="checkpoints",
            ms=ms,
            text=f"steps stood still for {statistics.median(stalls):.2f} s at each of "
            f"{len(stalls)} saves",
            remedy="save less often (checkpoint.every), or to a faster disk",
        )
    ]


def incident_delays(
    incidents: Sequence[Mapping[str, Any]], *, steps_ms: Sequence[float]
) -> list[Delay]:
    """Steps that compiled again because the shape of an argument changed."""
    found = [each for each in incidents if each["kind"] == RECOMPILED]
    if not found or not steps_ms:
        return []
    usual = statistics.median(steps_ms)
    lost = sum(ms - usual for ms in sorted(steps_ms)[-len(found) :])
    return [
        Delay(
            cause="recompilation",
            ms=max(0.0, lost / len(steps_ms)),
            text=f"{len(found)} times, at step {found[0]['step']}: {found[0]['text']}",
            remedy="give every batch one shape",
        )
    ]
