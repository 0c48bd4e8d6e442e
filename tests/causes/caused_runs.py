"""Causes made to happen in small jobs, and the gain of the remedy that is named, applied."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from causes.causes import (
    TRACE,
    TRAIN,
    CauseVerdict,
    alarms_of,
    cause,
    healthy,
    verdict_of_delays,
)
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.diagnostics.delays import explain_step
from jaxinfra.faults.arena import Arena, metrics, require
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.training.job import lower_step, make_job

_BATCH = "jaxinfra.data.packing:PackedWindows.batch"
_PUT = "jaxinfra.training.job:Job.put"
_SAVE = "jaxinfra.checkpoint.checkpointer:Checkpointer._start"
_EVALUATION = "jaxinfra.training.loop:Trainer._is_to_stop_evaluating"  # before each batch
_LOG = "jaxinfra.training.metrics:MetricsLog.write"
_ALWAYS = 1_000_000  # calls
_STEPS = 24
# Little else happens than steps; a save shows what the devices alone take for one.
_QUIET = (
    f"training.steps={_STEPS}",
    f"training.evaluate_every={_STEPS}",
    "checkpoint.every=12",
)
# One reader: of several, each would be late and together they would not.
_ONE_READER = ("data.num_prefetch_threads=1", "data.prefetch_batches=1")
# So much longer than a step without it that other work on these cores does not decide.
_TIMES = 8
_LEAST_S = 0.4


@cause(
    "stalled-reader",
    TRACE,
    made="the one reader sleeps before each batch, as behind a slow disk",
    runs=True,
)
def stalled_reader(arena: Arena) -> CauseVerdict:
    """The remedy: as many readers as make a batch per step."""
    plan = _sleep(_BATCH, _stall_s(arena, 1))
    threads = 2 * _TIMES
    many = (f"data.num_prefetch_threads={threads}", f"data.prefetch_batches={threads}")
    # With the fault as before.
    remedied = _run(arena, "stalled-reader-remedied", *many, faults=[plan])
    words = "to waiting for input: no batch"
    return _verdict(
        arena, "stalled-reader", plan, words=words, settings=_ONE_READER, without=remedied
    )


@cause(
    "slow-transform",
    TRACE,
    made="the one reader compresses text before each batch, as a tokenizer would compute",
    runs=True,
)
def slow_transform(arena: Arena) -> CauseVerdict:
    """The remedy: this work done once, before."""
    plan = {
        "target": _BATCH,
        "action": "jaxinfra.faults.corruption:compute_long",
        "until": _ALWAYS,
        "seconds": _stall_s(arena, 1),
    }
    words = "to waiting for input, whose readers compute"
    return _verdict(arena, "slow-transform", plan, words=words, settings=_ONE_READER)


@cause("slow-loader", TRACE, made="rank 1 of 2 sleeps before each batch", runs=True)
def slow_loader(arena: Arena) -> CauseVerdict:
    """One rank's batches take long, and the others wait for it."""
    plan = _sleep(_BATCH, _stall_s(arena, 2), rank=1)
    words = "to rank 1, which is slow: .*its input"
    return _verdict(arena, "slow-loader", plan, words=words, processes=2, settings=_ONE_READER)


@cause("slow-host", TRACE, made="rank 1 of 2 sleeps as it places each batch", runs=True)
def slow_host(arena: Arena) -> CauseVerdict:
    """One rank's host is slow to place its batches."""
    plan = _sleep(_PUT, _stall_s(arena, 2), rank=1)
    words = "to rank 1, which is slow: .*placing its batch"
    return _verdict(arena, "slow-host", plan, words=words, processes=2)


@cause("slow-placement", TRACE, made="each batch sleeps on its way to the device", runs=True)
def slow_placement(arena: Arena) -> CauseVerdict:
    """All hosts are slow to place batches."""
    plan = _sleep(_PUT, _stall_s(arena, 1))
    return _verdict(arena, "slow-placement", plan, words="to placing batches")


@cause("blocking-callback", TRACE, made="each step's record is written with a sleep", runs=True)
def blocking_callback(arena: Arena) -> CauseVerdict:
    """What is called after each step keeps the next one waiting."""
    plan = _sleep(_LOG, _stall_s(arena, 1))
    return _verdict(arena, "blocking-callback", plan, words="to host work between steps")


@cause(
    "slow-checkpoints",
    TRACE,
    made="saves begin with a sleep of 1.5 s, as on a slow disk",
    runs=True,
)
def slow_checkpoints(arena: Arena) -> CauseVerdict:
    """The remedy: saves as seldom as is said."""
    plan = _sleep(_SAVE, 1.5)
    return _seldom(arena, "slow-checkpoints", "checkpoint.every", "to checkpoints", faults=[plan])


@cause(
    "frequent-evaluation",
    TRACE,
    made="evaluations every other step, each batch with a sleep",
    runs=True,
)
def frequent_evaluation(arena: Arena) -> CauseVerdict:
    """The remedy: evaluations as seldom as is said."""
    plan = _sleep(_EVALUATION, _LEAST_S / 8)
    setting = "training.evaluate_every"
    return _seldom(arena, "frequent-evaluation", setting, "to evaluations", faults=[plan])


def _seldom(
    arena: Arena, name: str, setting: str, words: str, faults: list[dict[str, Any]] | None = None
) -> CauseVerdict:
    """Something that is done every other step, then as seldom as its report advises."""
    often = _run(arena, name, f"{setting}=2", faults=faults or [])
    found = verdict_of_delays(explain_step(often), words=words, measured_ms=0.0)
    advised = [word for word in found.remedy.replace(",", "").split() if word.startswith(setting)]
    require(advised, f"{name}: the remedy names no {setting}: {found.remedy!r}")
    seldom = _run(arena, f"{name}-remedied", advised[0], faults=faults or [])
    measured = _wall_ms(often) - _wall_ms(seldom)
    return verdict_of_delays(explain_step(often), words=words, measured_ms=measured)


@cause("changed-shape", TRACE, made="one batch has half the tokens", runs=True)
def changed_shape(arena: Arena) -> CauseVerdict:
    """The step compiles again."""
    plan = {"target": _PUT, "action": "jaxinfra.faults.corruption:shorten", "call": 7, "until": 7}
    run = _run(arena, "changed-shape", faults=[plan])
    words = r"to recompilation: .*batch\.tokens was int32\[8, 16\] and is int32\[8, 8\]"
    # Of these steps alone: one that other work on this machine delays would decide a mean of all.
    runs = (run, _reference(arena, 1))
    ours, usual = (sum(_steps_ms(each)[4:10]) for each in runs)
    measured = (ours - usual) / len(_steps_ms(run))
    return verdict_of_delays(explain_step(run), words=words, measured_ms=measured)


@cause(
    "too-little-memory", TRAIN, made="a device with nine tenths of what the step needs", runs=True
)
def too_little_memory(arena: Arena) -> CauseVerdict:
    """The report's first remedy, applied, must run to the end on the same device."""
    config = RunDirectory(_reference(arena, 1)).read_config()
    needs = step_bytes(lower_step(make_job(config)).compile())
    plan = {
        "target": "jaxinfra.training.loop:same_program",
        "action": "jaxinfra.faults.corruption:exceed_memory",
        "limit": int(0.9 * needs),
    }
    command = arena.settings(*_QUIET, processes=1)
    ended = arena.run("too-little-memory", command, faults=[plan], restarts=0, processes=1)
    require(ended.code == 1, f"exit {ended.code}: {ended.said[-2000:]}")
    file = arena.directory / "too-little-memory" / "out-of-memory.json"
    require(file.exists(), f"no report: {ended.said[-2000:]}")
    report = json.loads(file.read_text())
    options = report["remedies"][0]["options"] if report["remedies"] else []
    again = arena.run(
        "too-little-memory-remedied", [*command, *options], faults=[plan], restarts=0, processes=1
    )
    said = next((line for line in ended.said.splitlines() if "out of memory:" in line), "")
    return CauseVerdict(
        said=said.partition("out of memory:")[1] + said.partition("out of memory:")[2],
        named=bool(said) and bool(options) and again.code == 0,
        remedy=" ".join(options),
    )


@healthy("one-process", TRACE, what="a job of one process", runs=True)
def one_process(arena: Arena) -> str:
    """The reference of most causes here."""
    return alarms_of(explain_step(_reference(arena, 1)))


@healthy("two-processes", TRACE, what="a job of two processes", runs=True)
def two_processes(arena: Arena) -> str:
    """The reference of slow ranks."""
    return alarms_of(explain_step(_reference(arena, 2)))


@healthy("accumulation", TRACE, what="micro-batches, recomputation and default readers", runs=True)
def accumulating(arena: Arena) -> str:
    """Another configuration."""
    settings = (*_QUIET, "training.accumulation=4", "training.remat=full")
    return alarms_of(explain_step(arena.reference(*settings, processes=1)))


@healthy("sharded", TRACE, what="two processes, each with half of the state (fsdp=2)", runs=True)
def sharded(arena: Arena) -> str:
    """Another mesh."""
    command = [*arena.settings(*_QUIET, processes=2), "--mesh", "fsdp=2"]
    ended = arena.run("sharded", command, restarts=0, processes=2)
    require(ended.code == 0, ended.said[-2000:])
    return alarms_of(explain_step(arena.directory / "sharded"))


def _sleep(target: str, seconds: float, **where: Any) -> dict[str, Any]:
    return {"target": target, "action": "sleep", "value": seconds, "until": _ALWAYS, **where}


def _reference(arena: Arena, processes: int) -> Path:
    return arena.reference(*_QUIET, processes=processes)


def _stall_s(arena: Arena, processes: int) -> float:
    """A delay that decides how long a step takes, however slow this machine is at the moment."""
    return max(_LEAST_S, _TIMES * _median_ms(_reference(arena, processes)) / 1e3)


def _run(
    arena: Arena,
    name: str,
    *settings: str,
    faults: list[dict[str, Any]],
    processes: int = 1,
) -> Path:
    """A job, run to its end."""
    command = arena.settings(*_QUIET, *settings, processes=processes)
    ended = arena.run(name, command, faults=faults, restarts=0, processes=processes)
    require(ended.code == 0, f"{name}: {ended.said[-2000:]}")
    return arena.directory / name


def _verdict(
    arena: Arena,
    name: str,
    plan: Mapping[str, Any],
    *,
    words: str,
    processes: int = 1,
    settings: Sequence[str] = (),
    without: Path | None = None,
) -> CauseVerdict:
    """Of a job with a fault, beside one ``without`` what that costs: the reference by default."""
    run = _run(arena, name, *settings, faults=[dict(plan)], processes=processes)
    beside = without or _reference(arena, processes)
    measured = _median_ms(run) - _median_ms(beside)
    return verdict_of_delays(explain_step(run), words=words, measured_ms=measured)


def _steps_ms(run: Path) -> list[float]:
    return [1e3 * line["step_s"] for line in metrics(run) if line.get("step_s")]


def _median_ms(run: Path) -> float:
    return statistics.median(_steps_ms(run))


def _wall_ms(run: Path, *, first: int = 4) -> float:
    """Of a step, with what is done between steps, after all that is compiled has been."""
    at = {line["step"]: line["elapsed_s"] for line in metrics(run) if "elapsed_s" in line}
    last = max(at)
    return 1e3 * (at[last] - at[first]) / (last - first)
