"""Traces of a run's ranks and devices, each read beside its compiled program.

In a CUDA graph's replay, the trace names the graph instead of each kernel's HLO instruction. The
kernels run in program order, so they are matched with the program's list of launches. An XLA kernel
matches the next instruction with its name, a library's kernel the next call of a library.
"""

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

from jaxinfra.diagnostics.trace import TraceEvent, events_by_device, mesh_axes, newest, traced_ranks
from jaxinfra.diagnostics.waterfall import Waterfall, explain
from jaxinfra.errors import DataError
from jaxinfra.hlo.program import Launch
from jaxinfra.training.profile import LAUNCHES_FILE, STEP_FILE, TracedStep

_GRAPH = "command_buffer"
_LIBRARY = "a library's"
_MOSAIC = "mosaic_gpu"
_HELPERS = ("memset", "memcpy")


def read_launches(trace: Path) -> list[Launch]:
    """Reads the list of a traced program's kernel launches, written beside the trace.

    Returns an empty list if there is no file.
    """
    return newest(trace, LAUNCHES_FILE, holds=list[Launch]) or []


def with_names(events: Sequence[TraceEvent], launches: Sequence[Launch]) -> list[TraceEvent]:
    """Fills in each event's HLO instruction and source operation from the list of launches."""
    if not launches:
        return list(events)
    walk = _Walk(launches)
    named: list[TraceEvent] = []
    before: list[int] = []  # what comes before an instruction's kernel: memory it clears
    for event in events:
        place = walk.find(event)
        if place is None:
            before.append(len(named))
            named.append(event)
            continue
        launch = launches[place]
        named.append(_named(event, launch))
        for waiting in before:
            named[waiting] = _named(named[waiting], launch)
        before.clear()
    return named


def _named(event: TraceEvent, launch: Launch) -> TraceEvent:
    hlo_op = launch["instruction"] if _is_hidden(event) else event.hlo_op
    op_name = event.op_name or launch["op_name"]
    return dataclasses.replace(event, hlo_op=hlo_op, op_name=op_name)


def _is_hidden(event: TraceEvent) -> bool:
    return event.hlo_op.startswith(_GRAPH)


@final
class _Walk:
    """A position in a program's launch list, which advances as launches are found in a trace."""

    def __init__(self, launches: Sequence[Launch]):
        self._launches = launches
        self._now = -1
        self._by_name = {each["instruction"]: place for place, each in enumerate(launches)}
        self._alike = {each["kernel"]: each["alike"] for each in launches if each["kernel"]}
        self._places: dict[str, list[int]] = collections.defaultdict(list)
        for place, each in enumerate(launches):
            self._places[self._class_of(each)].append(place)
        self._loops: dict[int, tuple[int, int]] = {}
        for place, each in enumerate(launches):
            for loop in each["loops"]:
                first, _ = self._loops.get(loop, (place, place))
                self._loops[loop] = first, place

    def _class_of(self, launch: Launch) -> str:
        if launch["alike"]:
            return launch["alike"]
        return _MOSAIC if _MOSAIC in launch["target"] else _LIBRARY

    def find(self, event: TraceEvent) -> int | None:
        """Returns the launch that an event belongs to; None if unknown or still to come."""
        if not _is_hidden(event):
            found = self._by_name.get(event.hlo_op)
            if found is not None:
                self._now = found
            return found
        kernel = event.kernel.lower()
        if any(helper in kernel for helper in _HELPERS):
            return None
        wanted = self._alike.get(event.kernel)
        if wanted is None:
            wanted = _MOSAIC if _MOSAIC in kernel else _LIBRARY
            if wanted == _LIBRARY and self._continues():
                return self._now  # a call of a library may take several kernels
        places = self._places.get(wanted)
        if not places:
            return None
        self._now = min(self._candidates(places), key=self._distance)
        return self._now

    def _continues(self) -> bool:
        """Tells whether a library's kernel belongs to this launch, since the next is another's."""
        if self._now < 0 or self._class_of(self._launches[self._now]) != _LIBRARY:
            return False
        ahead = self._places[_LIBRARY]
        next_one = bisect.bisect_right(ahead, self._now)
        return next_one == len(ahead) or ahead[next_one] > self._now + 4

    def _candidates(self, places: list[int]) -> Iterable[int]:
        """Returns possible next positions: ahead, at each loop's start, or the program's."""
        bounds = [self._now + 1, 0]
        if self._now >= 0:
            bounds += [self._loops[loop][0] for loop in self._launches[self._now]["loops"]]
        for bound in bounds:
            found = bisect.bisect_left(places, bound)
            if found < len(places):
                yield places[found]

    def _distance(self, place: int) -> int:
        """Returns the number of launches up to a position, wrapping at a loop's end."""
        if place > self._now:
            return place - self._now
        for loop in reversed(self._launches[self._now]["loops"]):
            first, last = self._loops[loop]
            if first <= place:
                return last - self._now + place - first + 1
        return len(self._launches) - self._now + place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """One training step of a run, traced on its ranks' devices."""

    waterfall: Waterfall  # of the device that was asked for
    by_device: dict[str, Waterfall]  # of all devices, by names such as "rank 1 GPU 3"
    step: TracedStep | None  # None: no description was written


def read_traced_run(
    directory: Path, *, rank: int = 0, device: int = 0, steps: int | None = None
) -> TracedRun:
    """Reads all traces of a run, or of any directory that has a trace.

    Args:
        rank: the rank that has ``device``.
        steps: number of steps per trace; by default found from the trace.

    Raises:
        DataError: there is no trace, or none of that device.
    """
    launches, axes = read_launches(directory), mesh_axes(directory)
    ranks = list(traced_ranks(directory)) or [rank]
    events = {each: events_by_device(directory, rank=each) for each in ranks}
    if device not in events.get(rank, {}):
        there = ", ".join(f"rank {r}: {sorted(found)}" for r, found in events.items())
        raise DataError(f"{directory} has no trace of GPU {device} of rank {rank}; it has {there}")
    found: dict[tuple[int, int], Waterfall] = {
        (which, number): explain(with_names(each, launches), steps=steps, axes=axes)
        for which, by_device in events.items()
        for number, each in by_device.items()
    }
    names = {key: _name(*key, ranks=len(ranks), events=events) for key in found}
    return TracedRun(
        waterfall=found[rank, device],
        by_device={names[key]: each for key, each in found.items()},
        step=newest(directory, STEP_FILE, holds=TracedStep),
    )


def _name(rank: int, device: int, *, ranks: int, events: dict[int, dict]) -> str:
    parts = [f"rank {rank}"] if ranks > 1 else []
    if len(events[rank]) > 1 or not parts:
        parts.append(f"GPU {device}")
    return " ".join(parts)
