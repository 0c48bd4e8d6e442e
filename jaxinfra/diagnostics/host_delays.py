"""Delays by a run's hosts, from the flight recorders of its ranks.

A host prepares the next step while its devices compute. So a step takes as long as the slower of
the two, and no remedy on the host makes it shorter than the device time. The device time is
measured at steps whose end the host awaits before it launches the next: those before a probe, a
comparison of replicas, a save or an evaluation.
"""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

from jaxinfra.runtime.recorder import BUSY_READERS, READY_BATCHES, Event, RankRecord


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """One cause of delay in a training step, and the time per step that its removal saves."""

    cause: str
    ms: float  # per step
    text: str  # what was seen
    remedy: str


_PHASES = ("input", "place", "step", "wait", "host", "compile", "evaluate", "save", "probe")
_ALONE = ("input", "place", "step", "host")
"""Phases of a rank in which its devices wait for no other rank."""
_SHARE = 0.1
"""Share of a step that a phase takes at least to count: less is the queue's own time."""
_OVERHEAD = 0.25
"""Least share for batch placement and step records: a step of a millisecond has little else."""
_BUSY = 0.25
"""Share of the readers' time above which they compute, and do not wait for a disk."""
_FEW_STEPS = 4
"""Number of steps under which a run says too little of its hosts."""
_RARE = 0.02
"""Share of a step that evaluations should take at most."""

_CAUSES = {
    "input": Delay(
        cause="waiting for input",
        ms=0.0,
        text="no batch is ready when the step could begin",
        remedy="raise data.num_prefetch_threads and data.prefetch_batches, or read from a faster "
        "disk",
    ),
    "place": Delay(
        cause="placing batches",
        ms=0.0,
        text="each batch takes so long to reach the devices",
        remedy="look at what else runs on the host's cores and on its links to the devices "
        "(jaxinfra doctor)",
    ),
    "host": Delay(
        cause="host work between steps",
        ms=0.0,
        text="callbacks, loggers or the metrics' file keep the next step from being launched",
        remedy="let callbacks and loggers work in a thread of their own, or at fewer steps, and "
        "write runs to a fast disk",
    ),
}
_COMPUTING = Delay(
    cause="waiting for input, whose readers compute",
    ms=0.0,
    text="no batch is ready when the step could begin, and its readers compute",
    remedy="do this work once, before training: tokenize and transform ahead (data.source as "
    "arrays of tokens)",
)

_SAMPLING = Delay(
    cause="sampling",
    ms=0.0,
    text="the step waits for its rollout's completions and rewards",
    remedy="sample beside training (rl.overlap=true), more at once (rl.max_running), or shorter "
    "completions (rl.max_new_tokens); rl/reward_s is what rewards take of it (rl.reward_workers)",
)


def phase_times(record: RankRecord) -> dict[str, dict[int, float]]:
    """Returns a rank's milliseconds in each host phase by step, from its ring buffer.

    The first step is left out, since its time may include compilation.
    """
    phases = _phases(record)
    steps = set(sorted({event.step for event in phases})[1:-1])
    spent: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for begun, ended in itertools.pairwise(phases):
        if begun.step in steps:
            of_phase = spent[begun.name]
            of_phase[begun.step] = of_phase.get(begun.step, 0.0) + 1e3 * ended.value
    return {
        name: {step: of_step.get(step, 0.0) for step in sorted(steps)}
        for name, of_step in spent.items()
    }


def phase_ms(record: RankRecord) -> dict[str, float]:
    """Returns a rank's milliseconds per step in each host phase, by medians."""
    # The median: one step that saved or was interrupted tells of that alone.
    return {
        name: statistics.median(of_step.values()) for name, of_step in phase_times(record).items()
    }


def _without_ready_input(record: RankRecord) -> dict[str, float]:
    """``phase_ms`` without the time in which ready batches were handed over: on a busy host
    that takes a while, which more readers do not change.
    """
    found = phase_ms(record)
    ready = [event.value for event in record.events if event.name == READY_BATCHES]
    if ready and statistics.median(ready) > 0:
        found.pop("input", None)
    return found


def devices_ms(records: Sequence[RankRecord]) -> float | None:
    """Returns device milliseconds per step; None if the host never awaited a step's end at once.

    The shortest time among the ranks counts: other ranks' times include waiting in collectives.
    """
    by_step: dict[int, list[float]] = collections.defaultdict(list)
    for record in records:
        for step, ms in _waited_for(_phases(record)):
            by_step[step].append(ms)
    whole = [min(each) for each in by_step.values() if len(each) == len(records)]
    return statistics.median(whole) if whole else None


def _waited_for(phases: Sequence[Event]) -> list[tuple[int, float]]:
    """Returns steps that the host waited for before it launched the next one, with their ms."""
    spans = [(begun, 1e3 * ended.value) for begun, ended in itertools.pairwise(phases)]
    found = []
    for place, (launch, whole) in enumerate(spans):
        if launch.name != "step":
            continue
        beside = 0.0  # of the host, while the devices compute or have done so
        for then, ms in spans[place + 1 :]:
            if then.name in ("input", "step"):
                break
            is_own = then.step == launch.step
            if then.name == "wait" and not is_own and ms > _SHARE * whole:
                whole = 0.0  # the devices begin with this step only now
                continue
            whole += ms
            beside += ms if then.name == "host" else 0.0
            if then.name == "wait" and is_own:
                # Where nothing was left to wait for, they were done before the host was.
                found.append((launch.step, whole - (beside if ms < _SHARE * whole else 0.0)))
                break
    return found


def _phases(record: RankRecord) -> list[Event]:
    return [event for event in record.events if event.name in _PHASES]


def host_delays(
    records: Sequence[RankRecord], *, step_ms: float, steps: int, samples: bool = False
) -> list[Delay]:
    """Finds a rank that other ranks wait for, or a host phase that the devices wait for.

    Args:
        samples: the run's input is what its own model samples.
    """
    if steps < _FEW_STEPS:
        return []
    phases = {record.rank: _without_ready_input(record) for record in records}
    phases = {rank: each for rank, each in phases.items() if each}
    if not phases:
        return []
    devices = devices_ms(records)
    found = _slow_rank(phases, devices, step_ms)
    if found is None:
        found = _slow_phase(phases, devices, step_ms, busy=_busy_readers(records))
    if samples and found is not None and found.cause.startswith(_CAUSES["input"].cause):
        found = dataclasses.replace(_SAMPLING, ms=found.ms)
    return [] if found is None else [found]


def _slow_rank(
    phases: Mapping[int, Mapping[str, float]], devices: float | None, step_ms: float
) -> Delay | None:
    alone = {rank: sum(each.get(name, 0.0) for name in _ALONE) for rank, each in phases.items()}
    slowest = max(alone, key=alone.__getitem__)
    others = [ms for rank, ms in alone.items() if rank != slowest]
    behind = alone[slowest] - statistics.median(others) if others else 0.0
    mine = phases[slowest]
    won = _won(behind, mine.get("wait", 0.0), devices, step_ms)
    if not others or min(behind, won) <= _SHARE * step_ms:
        return None
    where = max(_ALONE, key=lambda name: mine.get(name, 0.0))
    what = {"input": "waiting for its input", "place": "placing its batch"}
    what["host"] = "in callbacks, loggers and metrics"
    return Delay(
        cause=f"rank {slowest}, which is slow",
        ms=won,
        text=f"it spends {mine.get(where, 0.0):.0f} ms "
        f"{what.get(where, 'handing steps to its devices')}, and all wait for it",
        remedy="look at its loader and disk"
        if where == "input"
        else "look at what else runs on its host, or give the job another node",
    )


def _slow_phase(
    phases: Mapping[int, Mapping[str, float]],
    devices: float | None,
    step_ms: float,
    *,
    busy: float | None,
) -> Delay | None:
    usual = {
        name: statistics.median(each.get(name, 0.0) for each in phases.values())
        for name in (*_CAUSES, "wait")
    }
    worst = max(_CAUSES, key=usual.__getitem__)
    ms, ahead = usual[worst], usual["wait"]
    won = _won(ms, ahead, devices, step_ms)
    # While the host waits for its devices, it may as well do something else.
    least = (_SHARE if worst == "input" else _OVERHEAD) * step_ms
    if min(ms, won) <= least or ms <= ahead:
        return None
    found, text = _CAUSES[worst], _CAUSES[worst].text
    if worst == "input" and busy is not None and busy > _BUSY:
        found, text = _COMPUTING, f"{_COMPUTING.text} for {busy:.0%} of their time"
    return dataclasses.replace(found, ms=won, text=text)


def _won(ms: float, ahead: float, devices: float | None, step_ms: float) -> float:
    """Returns what a step saves without ``ms`` of host work, given the wait for its devices."""
    if devices is None:
        return min(ms, step_ms)
    return max(0.0, step_ms - max(devices, step_ms - ms - ahead))


def _busy_readers(records: Sequence[RankRecord]) -> float | None:
    shares = [
        event.value for each in records for event in each.events if event.name == BUSY_READERS
    ]
    return statistics.median(shares) if shares else None


def evaluation_delays(records: Sequence[RankRecord], *, step_ms: float) -> list[Delay]:
    """Finds evaluations that take a large part of a run's time; the first one is left out."""
    spent: dict[int, float] = collections.defaultdict(float)
    if not records:
        return []
    for begun, ended in itertools.pairwise(_phases(records[0])):
        if begun.name == "evaluate":
            spent[begun.step] += 1e3 * ended.value
    steps = sorted(spent)
    if len(steps) < 3:
        return []
    every = statistics.median(later - step for step, later in itertools.pairwise(steps))
    ms = statistics.median(spent[step] for step in steps[1:])
    seldom = steps_between(ms, step_ms)
    won = ms / every - ms / seldom
    if won <= _SHARE * step_ms:
        return []
    return [
        Delay(
            cause="evaluations",
            ms=won,
            text=f"each takes {ms / 1e3:.2f} s, every {every:g} steps",
            remedy=f"training.evaluate_every={seldom}, or fewer held-out texts",
        )
    ]


def steps_between(ms: float, step_ms: float) -> int:
    """Returns the interval in steps at which work of ``ms`` costs 2% of the step time."""
    exact = max(1.0, ms / (_RARE * step_ms))
    digits = 10 ** max(0, len(str(int(exact))) - 1)
    return int(-(-exact // digits) * digits)
