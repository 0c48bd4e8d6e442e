"""Causes of a slow step or of too little memory, made to happen, and whether they are named first.

Each runs a small job twice, as it is and with the cause, and compares what ``jaxinfra trace`` says
the cause costs with the time that is won without it.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.diagnostics.delays import Explanation, explain_step
from jaxinfra.gym.arena import Arena, metrics, require
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.recompute import step_bytes

_BATCH = "jaxinfra.data.packing:PackedWindows.batch"
_PUT = "jaxinfra.training.job:Job.put"
_SAVE = "jaxinfra.checkpoint.checkpointer:Checkpointer._start"
_ALWAYS = 1_000_000  # calls
_STALL_S = 0.4
# One reader: of several, each would be late and together they would not.
_ONE_READER = ("data.num_prefetch_threads=1", "data.prefetch_batches=1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CauseVerdict:
    """What was said of a job with one cause."""

    cause: str
    made_by: str
    said: str  # the first cause named, or the report's first line
    is_first: bool
    predicted_ms: float | None  # per step, of the cause
    measured_ms: float | None  # that steps take longer than without it


type _Judge = Callable[[Arena], CauseVerdict]

CAUSES: dict[str, _Judge] = {}


def _cause(name: str) -> Callable[[_Judge], _Judge]:
    def enter(function: _Judge) -> _Judge:
        CAUSES[name] = function
        return function

    return enter


@_cause("healthy")
def healthy(arena: Arena) -> CauseVerdict:
    """Nothing is made to happen, and nothing must be named."""
    explained = explain_step(None, arena.reference(*_ONE_READER))
    assert explained is not None
    first = explained.delays[0].cause if explained.delays else "nothing"
    return CauseVerdict(
        cause="none",
        made_by="-",
        said=first,
        is_first=not explained.delays,
        predicted_ms=None,
        measured_ms=None,
    )


@_cause("stalled-reader")
def stalled_reader(arena: Arena) -> CauseVerdict:
    """Every rank's batches take long to read."""
    plan = _sleep(_BATCH, _STALL_S)
    return _named(arena, "stalled-reader", plan, "waiting for input", f"{_STALL_S} s per batch")


@_cause("slow-loader")
def slow_loader(arena: Arena) -> CauseVerdict:
    """One rank's batches do, and the others wait for it."""
    plan = _sleep(_BATCH, _STALL_S, rank=1)
    return _named(arena, "slow-loader", plan, "rank 1, which is slow", "rank 1 reads slowly")


@_cause("slow-host")
def slow_host(arena: Arena) -> CauseVerdict:
    """One rank's host is slow to place its batches."""
    plan = _sleep(_PUT, _STALL_S, rank=1)
    return _named(arena, "slow-host", plan, "rank 1, which is slow", "rank 1 places slowly")


@_cause("slow-checkpoints")
def slow_checkpoints(arena: Arena) -> CauseVerdict:
    """Steps stand still while a checkpoint is begun."""
    plan = _sleep(_SAVE, 2.0)
    found = _named(arena, "slow-checkpoints", plan, "checkpoints", "2 s per save")
    run = arena.place / "slow-checkpoints"
    stalls = sum(line.get("stall_s", 0.0) for line in metrics(run))
    usual = sum(line.get("stall_s", 0.0) for line in metrics(arena.reference(*_ONE_READER)))
    steps = sum("step_s" in line for line in metrics(run))
    return dataclasses.replace(found, measured_ms=1e3 * (stalls - usual) / steps)


@_cause("changed-shape")
def changed_shape(arena: Arena) -> CauseVerdict:
    """A batch has fewer tokens, and the step compiles again."""
    plan = {"target": _PUT, "action": "jaxinfra.gym.corruption:shorten", "call": 7, "until": 7}
    command = arena.settings(*_ONE_READER, processes=1)
    ended = arena.run("changed-shape", command, faults=[plan], restarts=0, processes=1)
    require(ended.code == 0, ended.said[-2000:])
    explained = _explained(arena, "changed-shape")
    steps = [line["step_s"] for line in metrics(arena.place / "changed-shape") if "step_s" in line]
    known = [seconds for seconds in steps if seconds]
    return _judged(
        explained,
        cause="recompilation",
        made_by="a batch of half the length",
        measured_ms=1e3 * (statistics.mean(known) - statistics.median(known)),
    )


@_cause("too-little-memory")
def too_little_memory(arena: Arena) -> CauseVerdict:
    """The step needs more than the device has; its report's first remedy must fit."""
    config = RunDirectory(arena.reference(processes=1)).read_config()
    needs = step_bytes(lower_step(make_job(config)).compile())
    plan = {
        "target": "jaxinfra.training.loop:same_program",
        "action": "jaxinfra.gym.corruption:exceed_memory",
        "limit": int(0.9 * needs),
    }
    command = arena.settings(processes=1)
    ended = arena.run("too-little-memory", command, faults=[plan], restarts=0, processes=1)
    require(ended.code == 1, f"exit {ended.code}: {ended.said[-2000:]}")
    file = arena.place / "too-little-memory" / "out-of-memory.json"
    require(file.exists(), f"no report: {ended.said[-2000:]}")
    report = json.loads(file.read_text())
    remedies = report["remedies"]
    return CauseVerdict(
        cause="out of memory",
        made_by=f"a device of {plan['limit']} bytes for a step of {needs}",
        said=report["explained"],
        is_first="out of memory" in ended.said and bool(remedies) and remedies[0]["fits"],
        predicted_ms=None,
        measured_ms=None,
    )


def _sleep(target: str, seconds: float, **where: Any) -> dict[str, Any]:
    return {"target": target, "action": "sleep", "value": seconds, "until": _ALWAYS, **where}


def _named(
    arena: Arena, run: str, plan: Mapping[str, Any], cause: str, made_by: str
) -> CauseVerdict:
    reference = arena.reference(*_ONE_READER)
    ended = arena.run(run, arena.settings(*_ONE_READER), faults=[plan], restarts=0)
    require(ended.code == 0, ended.said[-2000:])
    times = [
        [line["step_s"] for line in metrics(each) if line.get("step_s")]
        for each in (arena.place / run, reference)
    ]
    return _judged(
        _explained(arena, run),
        cause=cause,
        made_by=made_by,
        measured_ms=1e3 * (statistics.median(times[0]) - statistics.median(times[1])),
    )


def _explained(arena: Arena, run: str) -> Explanation:
    found = explain_step(None, arena.place / run)
    require(found is not None, f"{run} has no steps")
    assert found is not None
    return found


def _judged(
    explained: Explanation, *, cause: str, made_by: str, measured_ms: float
) -> CauseVerdict:
    first = explained.delays[0] if explained.delays else None
    return CauseVerdict(
        cause=cause,
        made_by=made_by,
        said="nothing" if first is None else first.cause,
        is_first=first is not None and first.cause == cause,
        predicted_ms=None if first is None else first.ms,
        measured_ms=measured_ms,
    )
