"""A training step's time by cause: every moment of a trace is counted once."""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxinfra.diagnostics.trace import KINDS, CollectiveAxes, TraceEvent, kind_of, scope_of
from jaxinfra.errors import DataError
from jaxinfra.runtime.picture_style import BLUE, GREEN, ORANGE, PINK, RED, SKY, new_picture

IDLE = "idle"
EXAMPLE = Path(__file__).with_name("example.json")
"""``Waterfall.as_json`` of a step on four H200s, 94M parameters, fsdp=2 x tensor=2."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """Milliseconds per step and number of launches of one HLO instruction in a trace."""

    kernel: str
    hlo_op: str
    scope: str
    kind: str
    launches: int
    ms: float  # per step, over all launches


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisTime:
    """Communication time and bytes per step over one or more mesh axes."""

    exposed_ms: float  # not hidden under computation
    hidden_ms: float
    launches: float
    sent_bytes: float | None  # by this device, from the compiled program

    @property
    def sent_gb_per_s(self) -> float | None:
        """Rate in GB/s at which the device sends while communication runs."""
        ms = self.exposed_ms + self.hidden_ms
        return None if self.sent_bytes is None or not ms else self.sent_bytes / ms / 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Waterfall:
    """Milliseconds of a training step on one device, by cause."""

    steps: int
    span_ms: float  # from the first launch to the last end
    exposed_ms: dict[tuple[str, str], float]  # (scope, kind) to time; sums with idle to the span
    total_ms: dict[str, float]  # kind to time of all launches, hidden under others or not
    kernels: tuple[KernelTime, ...]  # longest first
    by_axis: dict[str, AxisTime]  # mesh axes to communication; empty where axes are not known

    def by_kind(self) -> dict[str, float]:
        """Exposed milliseconds per step by kind of event; ``idle`` is the rest."""
        return self._summed(1)

    def by_scope(self) -> dict[str, float]:
        """Exposed milliseconds per step by the program's named scopes, without idle time."""
        found = self._summed(0)
        found.pop(IDLE, None)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _summed(self, position: int) -> dict[str, float]:
        sums: dict[str, float] = collections.defaultdict(float)
        for names, ms in self.exposed_ms.items():
            sums[names[position]] += ms
        return dict(sums)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Reads a waterfall from the JSON values that ``as_json`` returns."""
        exposed = {(scope, kind): ms for scope, kind, ms in values["exposed_ms"]}
        shown: dict[str, float] = collections.defaultdict(float)
        for (_, kind), ms in exposed.items():
            shown[kind] += ms
        rates = {"sent_gb_per_s"}
        return cls(
            steps=values["steps"],
            span_ms=values["span_ms"],
            exposed_ms=exposed,
            total_ms={kind: max(ms, 0.0) + shown[kind] for kind, ms in values["hidden_ms"].items()},
            kernels=tuple(KernelTime(**each) for each in values["kernels"]),
            by_axis={
                axes: AxisTime(**{name: x for name, x in time.items() if name not in rates})
                for axes, time in values["communication_by_axis"].items()
            },
        )

    def as_json(self, *, top: int) -> dict[str, Any]:
        """Returns the waterfall as JSON values, with the ``top`` longest kernels."""
        return {
            "steps": self.steps,
            "span_ms": self.span_ms,
            "by_kind_ms": self.by_kind(),
            "by_scope_ms": self.by_scope(),
            "exposed_ms": [[*names, ms] for names, ms in self.exposed_ms.items()],
            "hidden_ms": {
                kind: ms - self.by_kind().get(kind, 0.0) for kind, ms in self.total_ms.items()
            },
            "communication_by_axis": {
                axes: dataclasses.asdict(time) | {"sent_gb_per_s": time.sent_gb_per_s}
                for axes, time in self.by_axis.items()
            },
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels[:top]],
        }


def explain(
    events: Sequence[TraceEvent], *, steps: int | None = None, axes: CollectiveAxes | None = None
) -> Waterfall:
    """Splits a traced step's time by cause: compute first, then copies, then communication.

    Every moment counts once. A collective or a copy counts only where it delays the step
    ("exposed"); the rest of its time is hidden under computation.

    Args:
        events: events of one device, as ``trace.events_by_device`` returns them.
        steps: number of steps in the trace; by default, the number of runs of its longest program.
        axes: axes of the traced program's collectives, where it ran on a mesh.

    Raises:
        DataError: there are no events.
    """
    if not events:
        raise DataError("the trace holds no GPU operation; profile steps after the first")
    steps = steps or _count_steps(events)
    exposed: dict[tuple[str, str], float] = collections.defaultdict(float)
    exposed_by_axis: dict[str, float] = collections.defaultdict(float)
    for event, ns in _exposures(events):
        names = (IDLE, IDLE) if event is None else (scope_of(event.op_name), kind_of(event))
        exposed[names] += ns / 1e6 / steps
        if axes is not None and event is not None and names[1] == "collective":
            exposed_by_axis[axes.of(event)] += ns / 1e6 / steps
    total: dict[str, float] = collections.defaultdict(float)
    for event in events:
        total[kind_of(event)] += event.duration_ns / 1e6 / steps
    first = min(event.start_ns for event in events)
    return Waterfall(
        steps=steps,
        span_ms=(max(event.end_ns for event in events) - first) / 1e6 / steps,
        exposed_ms=dict(exposed),
        total_ms=dict(total),
        kernels=tuple(_kernels(events, steps)),
        by_axis={} if axes is None else _by_axis(events, axes, exposed_by_axis, steps),
    )


def _by_axis(
    events: Iterable[TraceEvent], axes: CollectiveAxes, exposed: Mapping[str, float], steps: int
) -> dict[str, AxisTime]:
    groups: dict[str, list[TraceEvent]] = collections.defaultdict(list)
    for event in events:
        if kind_of(event) == "collective":
            groups[axes.of(event)].append(event)
    found = {
        name: AxisTime(
            exposed_ms=exposed.get(name, 0.0),
            hidden_ms=sum(e.duration_ns for e in group) / 1e6 / steps - exposed.get(name, 0.0),
            launches=len(group) / steps,
            sent_bytes=axes.sent_bytes.get(name),
        )
        for name, group in groups.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].exposed_ms))


def _count_steps(events: Iterable[TraceEvent]) -> int:
    time: dict[str, float] = collections.defaultdict(float)
    launches: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in events:
        time[event.program] += event.duration_ns
        launches[event.program][event.hlo_op] += 1
    return min(launches[max(time, key=time.__getitem__)].values())


def _exposures(events: Sequence[TraceEvent]) -> Iterable[tuple[TraceEvent | None, float]]:
    """Yields intervals of time with the event that each counts for; None if the GPU was idle."""
    rank = {kind: place for place, kind in enumerate(KINDS)}
    bounds = sorted({bound for event in events for bound in (event.start_ns, event.end_ns)})
    waiting = sorted(events, key=lambda event: event.start_ns, reverse=True)
    running: list[
        tuple[int, int, TraceEvent]
    ] = []  # by kind; ended ones are dropped when they surface
    order = 0
    for begin, end in itertools.pairwise(bounds):
        while waiting and waiting[-1].start_ns <= begin:
            event = waiting.pop()
            heapq.heappush(running, (rank[kind_of(event)], order, event))
            order += 1
        while running and running[0][2].end_ns <= begin:
            heapq.heappop(running)
        yield (running[0][2] if running else None), end - begin


def _kernels(events: Iterable[TraceEvent], steps: int) -> list[KernelTime]:
    groups: dict[tuple[str, str], list[TraceEvent]] = collections.defaultdict(list)
    for event in events:
        groups[event.hlo_op, event.kernel].append(event)
    times = [
        KernelTime(
            kernel=kernel,
            hlo_op=hlo_op,
            scope=scope_of(group[0].op_name),
            kind=kind_of(group[0]),
            launches=len(group),
            ms=sum(event.duration_ns for event in group) / 1e6 / steps,
        )
        for (hlo_op, kernel), group in groups.items()
    ]
    return sorted(times, key=lambda time: -time.ms)


_COLORS = {
    "matmul": BLUE,
    "attention": ORANGE,
    "reduction": GREEN,
    "elementwise": SKY,
    "copy": PINK,
    "collective": RED,
    IDLE: "#dddddd",
}


def draw(waterfall: Waterfall, file: Path) -> None:
    """Plots a bar per scope: the milliseconds that it adds to the step, coloured by kind."""
    rows = [*waterfall.by_scope(), IDLE]
    figure, axes = new_picture(9, 1.2 + 0.32 * len(rows))
    left = 0.0
    for place, scope in enumerate(rows):
        for kind in (*KINDS, IDLE):
            ms = waterfall.exposed_ms.get((scope, kind), 0.0)
            if ms:
                axes.barh(place, ms, left=left, color=_COLORS[kind])
                left += ms
        row = sum(ms for (name, _), ms in waterfall.exposed_ms.items() if name == scope)
        axes.text(left, place, f" {row:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.06 * waterfall.span_ms)
    axes.set_xlabel(f"ms of a step of {waterfall.span_ms:.1f} ms")
    handles = [axes.barh(0, 0, color=color, label=kind) for kind, color in _COLORS.items()]
    axes.legend(handles=handles, fontsize=8, loc="upper right")
    figure.savefig(file, dpi=120)
