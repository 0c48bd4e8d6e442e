"""Step times that change during a run: which steps are slow, and why where it is known."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfra.diagnostics.host_delays import Delay, phase_times
from jaxinfra.runtime.recorder import RankRecord

_LEAST_RATIO = 1.5
"""Times the other steps' median from which steps count as slow."""
_LEAST_STEPS = 8
_LEAST_SHARE = 0.05
"""Share of a run's steps that are slow, and that are not, at least."""
_LEAST_EXPLAINED = 0.4
"""Share of the differences in step time that a slow stretch explains at least."""
_MOST_PIECES = 40
"""Number of equal pieces of a run between which a slow stretch begins and ends."""
_SAID_SHARE = 0.5
"""Share of the lost time that a host phase makes up to be the cause."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlowInterval:
    """Consecutive steps that take longer than all others of a run, by medians."""

    first: int  # steps, counted from 1
    last: int
    is_first: bool  # it begins with the run
    is_last: bool  # it lasts until the newest step
    slow_s: float
    usual_s: float
    share: float  # of the run's steps

    def describe(self) -> str:
        """Describes in words how much slower which steps are."""
        when = f"from step {self.first} to {self.last}"
        if self.is_last:
            when = f"since step {self.first}"
        elif self.is_first:
            when = f"until step {self.last}"
        return (
            f"steps take {self.slow_s / self.usual_s:.1f}x of the others' {1e3 * self.usual_s:.0f} "
            f"ms {when}"
        )


def slow_interval(lines: Sequence[Mapping[str, Any]]) -> SlowInterval | None:
    """Finds the stretch of slow steps that explains most of a run's differences in step time.

    Args:
        lines: lines of ``metrics.jsonl``; those without a step time are left out.
    """
    # The first steps compile, and fill the queues.
    timed = [(line["step"], line["step_s"]) for line in lines if line.get("step_s")][2:]
    size = max(1, -(-len(timed) // _MOST_PIECES))
    medians = np.array(
        [
            statistics.median(s for _, s in timed[start : start + size])
            for start in range(0, len(timed), size)
        ]
    )
    least = -(-max(_LEAST_STEPS, _LEAST_SHARE * len(timed)) // size)
    deviation = np.abs(medians - np.median(medians)).sum() if len(medians) else 0.0
    best, found = _LEAST_EXPLAINED * deviation, None
    for first, end in itertools.combinations(range(len(medians) + 1), 2):
        inside, outside = medians[first:end], np.delete(medians, slice(first, end))
        if min(len(inside), len(outside)) < least:
            continue
        slow, usual = np.median(inside), np.median(outside)
        if slow < _LEAST_RATIO * usual:
            continue
        explained = deviation - np.abs(inside - slow).sum() - np.abs(outside - usual).sum()
        if explained > best:
            best, found = explained, (first * size, end * size, float(slow), float(usual))
    if found is None:
        return None
    first, end, slow, usual = found
    first, end = _edges([s > (slow + usual) / 2 for _, s in timed], first, min(end, len(timed)))
    return SlowInterval(
        first=timed[first][0],
        last=timed[end - 1][0],
        is_first=first == 0,
        is_last=end == len(timed),
        slow_s=slow,
        usual_s=usual,
        share=(end - first) / len(timed),
    )


def _edges(is_slow: Sequence[bool], first: int, end: int) -> tuple[int, int]:
    """Moves the ends of a stretch, known to a piece, to the steps at which it begins and ends."""
    while first > 0 and is_slow[first - 1]:
        first -= 1
    while first < end - 1 and not is_slow[first]:
        first += 1
    while end < len(is_slow) and is_slow[end]:
        end += 1
    while end > first + 1 and not is_slow[end - 1]:
        end -= 1
    return first, end


def drift_delays(
    lines: Sequence[Mapping[str, Any]],
    records: Sequence[RankRecord],
    incidents: Sequence[Mapping[str, Any]],
    known: Sequence[Delay],
) -> list[Delay]:
    """Returns the delay by a stretch of slow steps, with its cause where records tell it.

    Args:
        known: delays by the run's hosts, of which one may be the cause.
    """
    found = slow_interval(lines)
    if found is None:
        return []
    text, remedy = _reason(found, records, incidents, known)
    lost_ms = 1e3 * (found.slow_s - found.usual_s) * found.share
    return [Delay(cause="steps that became slow", ms=lost_ms, text=text, remedy=remedy)]


def _reason(
    found: SlowInterval,
    records: Sequence[RankRecord],
    incidents: Sequence[Mapping[str, Any]],
    known: Sequence[Delay],
) -> tuple[str, str]:
    """Returns what was seen of a slow stretch, and its remedy."""
    said = found.describe()
    for each in incidents:
        if each["kind"] == "slow rank" and found.first <= each["step"] <= found.last + 1:
            return f"{said}; {each['text']}", "look at that rank's host, or give the job another"
    lost_ms = 1e3 * (found.slow_s - found.usual_s)
    for record in records:
        for name, by_step in phase_times(record).items():
            inside, outside = [], []
            for step, ms in by_step.items():
                (inside if found.first <= step <= found.last else outside).append(ms)
            if not inside or not outside:
                continue
            more = statistics.median(inside) - statistics.median(outside)
            if name != "wait" and more > _SAID_SHARE * lost_ms:
                of = f" of rank {record.rank}" if len(records) > 1 else ""
                return (
                    f"{said}; the host's phase {name!r}{of} takes {more:.0f} ms more in them",
                    "look at what changed there: its disk, its data, what else runs on its cores",
                )
    if known:
        return f"{said}; the hosts show {known[0].cause}", known[0].remedy
    return (
        f"{said}; no rank's host says why",
        "look at the GPUs' clocks and heat then (jaxinfra doctor), and profile such a step "
        "(--profile)",
    )
