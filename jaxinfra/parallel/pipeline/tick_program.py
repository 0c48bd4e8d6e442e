"""Executable schedule: the buffer slots that each action reads and writes, and the sends.

Each stage has three buffers. The inbox has received activations and cotangents. ``saved`` has
values that a forward pass saves for its backward pass. ``pending`` has values that an input
gradient saves for its weight gradient. A slot is reused once its value is dead, so the number of
slots is the peak number of live values.

Within a tick, a stage first computes and then exchanges, so it reads what earlier ticks sent.

The module also computes what a schedule costs: its bubble, by formula and by simulation, and its
memory. Bubbles are fractions of the time that the same work takes without a pipeline.
"""

import dataclasses
import heapq
from collections.abc import Mapping

import numpy as np

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.parallel.pipeline.schedule import Action, Kind, Schedule

type Pairs = tuple[tuple[int, int], ...]
"""(sender, receiver) stages; no stage twice on a side."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TickProgram:
    """Tables by tick and stage that the executor follows: actions, buffer slots and sends.

    The last slot of each buffer means that there is nothing to read or write.
    """

    schedule: Schedule
    num_inbox: int  # slots, including the last one, which is never read
    num_saved: int
    num_pending: int
    read: np.ndarray  # int [ticks, stages]: inbox slot of the action's input
    write: np.ndarray  # int [ticks, stages]: inbox slot of an output that stays on its stage
    saved: np.ndarray  # int [ticks, stages]
    pending: np.ndarray  # int [ticks, stages]
    receive: np.ndarray  # int [ticks, 2, stages]: inbox slots for the previous and next stage
    exchange: np.ndarray  # int [ticks]: index into ``exchanges``
    exchanges: tuple[tuple[Pairs, Pairs], ...]  # sends to the next and to the previous stage


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """An output on its way from the action that makes it to the one that reads it."""

    source: int  # stages
    target: int
    sent: int  # ticks
    used: int


def make_tick_program(schedule: Schedule) -> TickProgram:
    """Compiles a schedule: assigns buffer slots and finds the sends after each tick."""
    when = schedule.ticks()
    stages, shape = schedule.num_stages, (schedule.num_ticks, schedule.num_stages)

    saved, pending, inbox = (_Slots(stages) for _ in range(3))
    for action, tick in when.items():
        stage = int(schedule.stage_of[action.position])
        done = _tick_of(when, action, Kind.BACKWARD, Kind.WEIGHT)
        if action.kind is Kind.FORWARD:
            # A forward may reuse a slot from the tick after it was freed: a stage acts once a tick.
            saved.add(stage, tick, done + 1, action)
        elif action.kind is Kind.INPUT:
            pending.add(stage, tick, done + 1, action)
    messages = {action: message for action in when if (message := _message(schedule, when, action))}
    for action, message in messages.items():
        # Delivered at the end of its tick, so into a slot that the same tick has read.
        inbox.add(message.target, message.sent, message.used, action)
    slots = {name: s.assign() for name, s in (("s", saved), ("p", pending), ("i", inbox))}

    tables = {
        "read": np.full(shape, inbox.peak, np.int32),
        "write": np.full(shape, inbox.peak, np.int32),
        "saved": np.full(shape, max(saved.peak - 1, 0), np.int32),
        "pending": np.full(shape, max(pending.peak - 1, 0), np.int32),
    }
    receive = np.full((schedule.num_ticks, 2, stages), inbox.peak, np.int32)
    sent: list[tuple[set[tuple[int, int]], set[tuple[int, int]]]] = [
        (set(), set()) for _ in range(schedule.num_ticks)
    ]
    for action, tick in when.items():
        stage = int(schedule.stage_of[action.position])
        forward = dataclasses.replace(action, kind=Kind.FORWARD)
        tables["saved"][tick, stage] = slots["s"][forward]
        if action.kind in (Kind.INPUT, Kind.WEIGHT):
            source = dataclasses.replace(action, kind=Kind.INPUT)
            tables["pending"][tick, stage] = slots["p"][source]
        message = messages.get(action)
        if message is None:
            continue
        slot = slots["i"][action]
        tables["read"][message.used, message.target] = slot
        if message.source == message.target:
            tables["write"][tick, stage] = slot
            continue
        from_after = (message.source + 1) % stages != message.target
        sent[tick][from_after].add((message.source, message.target))
        receive[tick, int(from_after), message.target] = slot
    kinds = [(tuple(sorted(up)), tuple(sorted(down))) for up, down in sent]
    exchanges = tuple(sorted(set(kinds)))
    return TickProgram(
        schedule=schedule,
        num_inbox=inbox.peak + 1,
        num_saved=saved.peak,
        num_pending=pending.peak,
        receive=receive,
        exchange=np.array([exchanges.index(kind) for kind in kinds], np.int32),
        exchanges=exchanges,
        **tables,
    )


def _tick_of(when: dict[Action, int], action: Action, *kinds: Kind) -> int:
    """Tick of the first of these kinds that the action's run and micro-batch has."""
    alternatives = (dataclasses.replace(action, kind=kind) for kind in kinds)
    return next(when[alternative] for alternative in alternatives if alternative in when)


def _message(schedule: Schedule, when: dict[Action, int], action: Action) -> _Message | None:
    """Message from an action to the reader of its output. The last forward's is the cotangent of
    its own backward.
    """
    last = schedule.num_positions - 1
    match action.kind:
        case Kind.FORWARD if action.position == last:
            target, kinds = last, (Kind.BACKWARD, Kind.INPUT)
        case Kind.FORWARD:
            target, kinds = action.position + 1, (Kind.FORWARD,)
        case Kind.BACKWARD | Kind.INPUT if action.position > 0:
            target, kinds = action.position - 1, (Kind.BACKWARD, Kind.INPUT)
        case _:
            return None
    return _Message(
        source=int(schedule.stage_of[action.position]),
        target=int(schedule.stage_of[target]),
        sent=when[action],
        used=_tick_of(when, dataclasses.replace(action, position=target), *kinds),
    )


class _Slots:
    """Slots of one buffer on every stage, the same number on each."""

    def __init__(self, stages: int):
        self._spans: list[list[tuple[int, int, Action]]] = [[] for _ in range(stages)]
        self.peak = 0

    def add(self, stage: int, start: int, end: int, owner: Action) -> None:
        """A value that lives from tick ``start`` and is gone for values that start at ``end``."""
        self._spans[stage].append((start, end, owner))

    def assign(self) -> dict[Action, int]:
        """The lowest free slot for each, in order of time."""
        result = {}
        for spans in self._spans:
            free: list[int] = []
            busy: list[tuple[int, int]] = []  # (end, slot)
            used = 0
            for start, end, owner in sorted(spans, key=lambda span: span[:2]):
                while busy and busy[0][0] <= start:
                    heapq.heappush(free, heapq.heappop(busy)[1])
                if free:
                    slot = heapq.heappop(free)
                else:
                    slot, used = used, used + 1
                result[owner] = slot
                heapq.heappush(busy, (end, slot))
            self.peak = max(self.peak, used)
        return result


UNIT_TIMES: dict[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT: 1.0,
    Kind.WEIGHT: 1.0,
}
"""Forward, gradient of the input and gradient of the weights equally long: products alone."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Start and end times of a schedule's actions, in the unit of ``run``'s durations."""

    start: np.ndarray  # [ticks, stages]
    end: np.ndarray  # [ticks, stages]
    total: float
    bubble: float  # idle time over working time, of the busiest stage


def run(
    program: TickProgram,
    *,
    durations: Mapping[Kind, float] = UNIT_TIMES,
    head: float = 0.0,
) -> Timeline:
    """Simulates a program's timeline; a stage waits only for stages that it exchanges with.

    Args:
        durations: duration of one chunk's action, by its kind.
        head: time of the loss and its gradient, added to the last run's forward pass.
    """
    schedule = program.schedule
    shape = schedule.kind.shape
    length = np.zeros(shape)
    for kind, duration in durations.items():
        length[schedule.kind == kind] = duration
    position = schedule.position[np.arange(shape[1])[None, :], schedule.chunk]
    length[(schedule.kind == Kind.FORWARD) & (position == schedule.num_positions - 1)] += head
    start, end = np.zeros(shape), np.zeros(shape)
    free = np.zeros(shape[1])
    for tick in range(shape[0]):
        start[tick] = free
        end[tick] = free + length[tick]
        free = end[tick].copy()
        for pairs in program.exchanges[program.exchange[tick]]:
            for source, target in pairs:
                free[source] = max(free[source], end[tick, target])
                free[target] = max(free[target], end[tick, source])
    total, work = float(free.max()), float(length.sum(axis=0).max())
    return Timeline(start=start, end=end, total=total, bubble=total / work - 1.0)


def bubble_formula(
    name: PipelineSchedule, *, stages: int, micro_batches: int, chunks: int
) -> float:
    """Returns the bubble, idle over working time, of p stages, m micro-batches and v chunks.

    GPipe, 1F1B: (p-1)/m. ZB-H1: (p-1)/(3m) (Qi et al. 2024, table 2). ZB-V: (p-1)/(6m), the time
    until the last stage begins. Interleaved: (p-1)/(m v) (Narayanan et al. 2021, 2.2), or a little
    more if forward and backward passes take different times. The formulas of ZB-H1 and ZB-V assume
    that forward, input gradient and weight gradient take equal time.
    """
    match name:
        case PipelineSchedule.GPIPE | PipelineSchedule.ONE_F_ONE_B:
            return (stages - 1) / micro_batches
        case PipelineSchedule.INTERLEAVED:
            return (stages - 1) / (micro_batches * chunks)
        case PipelineSchedule.ZB_H1:
            return (stages - 1) / (3 * micro_batches)
        case PipelineSchedule.ZB_V:
            return (stages - 1) / (6 * micro_batches)


def live_chunks(schedule: Schedule) -> np.ndarray:
    """Counts chunks whose activations each stage keeps after each tick, int [ticks, stages]."""
    frees = (schedule.kind == Kind.BACKWARD) | (schedule.kind == Kind.WEIGHT)
    return np.cumsum((schedule.kind == Kind.FORWARD).astype(int) - frees, axis=0)


def peak_activations(schedule: Schedule) -> np.ndarray:
    """Computes each stage's peak activations, in units of a stage's for one micro-batch."""
    # A chunk holds its activations in the tick that frees them, too.
    return live_chunks(schedule).max(axis=0) / schedule.num_chunks
