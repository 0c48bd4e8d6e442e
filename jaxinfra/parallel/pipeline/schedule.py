"""A pipeline schedule as a table: which stage does what at which tick.

A tick is a row of the table, not a duration: a stage that idles in a tick takes no time for it, and
stages wait for each other only if one sends to the other.

Dims of tables: [ticks, stages].

One list scheduler makes all schedules, with a few rules per kind. In every tick, each stage takes
the action that its rule prefers among those that can run. An action needs its inputs and memory:
``capacity`` bounds the chunks whose activations a stage keeps.

All schedules but GPipe keep at most ``stages * chunks`` chunks, for any number of micro-batches.
1F1B and the zero-bubble schedules need as much as published; interleaved 1F1B as published keeps
``stages * (chunks + 1) - 1`` (Narayanan et al. 2021, section 2.2). Here, its stages alternate
forward and backward passes from the first backward pass on, and prefer the deepest chunk that can
run. They process the last ``stages`` micro-batches chunk by chunk. The bubble stays the same.

A backward pass that is split in two takes longer, since its halves exchange values through memory.
ZB-H1 fills its bubble with weight gradients of the first and last ``stages - 1`` micro-batches. So
only these backward passes are split here.
"""

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.errors import ConfigError


class Kind(enum.IntEnum):
    """The kind of work that a stage does in one tick, for one micro-batch and chunk of layers."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2  # the gradients of the input and of the weights
    INPUT = 3  # the gradient of the input only
    WEIGHT = 4  # the gradients of the weights, in a later tick than INPUT


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One entry of a schedule's table: a kind of work on one micro-batch and chunk."""

    kind: Kind
    micro_batch: int
    position: int  # of the chunk in the model: 0 embeds, the last one projects onto the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """A pipeline schedule: the table of actions, and the stage and chunk of each run of layers.

    A model is cut into ``num_positions`` equal runs of consecutive layers; run j is chunk
    ``chunk_of[j]`` of stage ``stage_of[j]``.
    """

    name: str
    micro_batches: int
    stage_of: np.ndarray  # int [positions]
    chunk_of: np.ndarray  # int [positions]
    kind: np.ndarray  # int [ticks, stages]: Kind
    micro_batch: np.ndarray  # int [ticks, stages]; 0 where idle
    chunk: np.ndarray  # int [ticks, stages]; 0 where idle

    @property
    def num_ticks(self) -> int:
        """Number of ticks, which are the rows of the table."""
        return self.kind.shape[0]

    @property
    def num_stages(self) -> int:
        """Number of stages: devices along the pipe axis."""
        return self.kind.shape[1]

    @property
    def num_positions(self) -> int:
        """Number of runs of layers in the whole model: stages times chunks."""
        return len(self.stage_of)

    @property
    def num_chunks(self) -> int:
        """Number of runs of layers per stage."""
        return self.num_positions // self.num_stages

    @property
    def position(self) -> np.ndarray:
        """Index of the run of layers in each chunk of each stage, int [stages, chunks]."""
        table = np.empty((self.num_stages, self.num_chunks), np.int32)
        table[self.stage_of, self.chunk_of] = np.arange(self.num_positions)
        return table

    def action(self, tick: int, stage: int) -> Action | None:
        """Returns a stage's action in a tick; None where it is idle."""
        kind = Kind(int(self.kind[tick, stage]))
        if kind is Kind.IDLE:
            return None
        return Action(
            kind=kind,
            micro_batch=int(self.micro_batch[tick, stage]),
            position=int(self.position[stage, self.chunk[tick, stage]]),
        )

    def ticks(self) -> dict[Action, int]:
        """Maps each action to its tick; to the last one for an action of several ticks."""
        return {
            action: tick
            for tick in range(self.num_ticks)
            for stage in range(self.num_stages)
            if (action := self.action(tick, stage)) is not None
        }


def violations(schedule: Schedule) -> list[str]:
    """Describes the rules that a schedule breaks; empty for a correct schedule.

    Every run of layers has one forward per micro-batch, and one backward or its two halves.
    A forward comes after the forward of the previous run. A backward comes after its own forward
    and the next run's backward; a weight gradient after its input gradient.
    """
    when = schedule.ticks()
    expected = {
        dataclasses.replace(action, kind=kind)
        for i in range(schedule.micro_batches)
        for j in range(schedule.num_positions)
        for action in [Action(kind=Kind.FORWARD, micro_batch=i, position=j)]
        for kind in (
            Kind.FORWARD,
            *(
                (Kind.INPUT, Kind.WEIGHT)
                if dataclasses.replace(action, kind=Kind.WEIGHT) in when
                else (Kind.BACKWARD,)
            ),
        )
    }
    found = [f"{action} is missing" for action in expected - when.keys()]
    found += [f"{action} does not belong" for action in when.keys() - expected]
    repeated = int(np.count_nonzero(schedule.kind)) - len(when)
    if repeated:
        found.append(f"{repeated} actions run twice")
    for action, tick in when.items():
        for before in _needs(action):
            if before in when and when[before] >= tick:
                found.append(f"{action} at tick {tick} needs {before} at tick {when[before]}")
    return found


def _needs(action: Action) -> list[Action]:
    """Actions that must precede this one, where they exist."""
    i, j = action.micro_batch, action.position

    def at(kind: Kind, position: int) -> Action:
        return Action(kind=kind, micro_batch=i, position=position)

    match action.kind:
        case Kind.FORWARD:
            return [at(Kind.FORWARD, j - 1)]
        case Kind.WEIGHT:
            return [at(Kind.INPUT, j)]
        case _:
            return [at(Kind.FORWARD, j), at(Kind.BACKWARD, j + 1), at(Kind.INPUT, j + 1)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """Actions that one stage could do next."""

    last: Kind  # F or B, what it did last; IDLE before its first
    forwards_done: bool
    actions: dict[Kind, Action]

    def first(self, *kinds: Kind) -> Action | None:
        return next((self.actions[kind] for kind in kinds if kind in self.actions), None)


type _Rule = Callable[[_Ready], Action | None]

_F, _B, _W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT  # B: whole, or the input's alone


def _forwards_first(ready: _Ready) -> Action | None:
    return ready.first(_B) if ready.forwards_done else ready.first(_F)


def _alternate(ready: _Ready) -> Action | None:
    """One forward, one backward; weight gradients only where neither can run."""
    return ready.first(_F, _B, _W) if ready.last is _B else ready.first(_B, _F, _W)


def make_schedule(
    name: PipelineSchedule,
    *,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    backward_ticks: int = 1,
) -> Schedule:
    """Makes the schedule called ``name``; raises ConfigError if it cannot have ``chunks`` chunks.

    Args:
        backward_ticks: assumed duration of a backward pass, in forward passes. A wrong value costs
            time only in the interleaved schedule, whose neighbouring stages exchange in every
            tick. The table has an action of several ticks in its last tick.
    """
    _check(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    is_gpipe, is_v = name is PipelineSchedule.GPIPE, name is PipelineSchedule.ZB_V
    splits = is_v or name is PipelineSchedule.ZB_H1
    position = np.arange(stages * chunks)
    chunk_of, stage_of = np.divmod(position, stages)
    if is_v:
        stage_of = np.where(chunk_of == 1, stages - 1 - stage_of, stage_of)
    scheduler = _ListScheduler(
        stage_of=stage_of,
        stages=stages,
        micro_batches=micro_batches,
        splits=_splitting(name, stages=stages, micro_batches=micro_batches),
        capacity=micro_batches if is_gpipe else stages * chunks,
        # The last micro-batches are worked off chunk by chunk: nothing else hides their way back.
        by_chunk_from=micro_batches - stages if name is PipelineSchedule.INTERLEAVED else None,
        length={_F: 1, _B: 2 if splits else backward_ticks, Kind.INPUT: 1, _W: 1},
    )
    rows = scheduler.run(_forwards_first if is_gpipe else _alternate)
    shape = (len(rows), stages)
    tables = {field: np.zeros(shape, np.int32) for field in ("kind", "micro_batch", "chunk")}
    for tick, row in enumerate(rows):
        for stage, action in enumerate(row):
            if action is not None:
                tables["kind"][tick, stage] = action.kind
                tables["micro_batch"][tick, stage] = action.micro_batch
                tables["chunk"][tick, stage] = chunk_of[action.position]
    schedule = Schedule(
        name=name.value,
        micro_batches=micro_batches,
        stage_of=stage_of.astype(np.int32),
        chunk_of=chunk_of.astype(np.int32),
        **tables,
    )
    assert not violations(schedule)
    return schedule


def _splitting(
    name: PipelineSchedule, *, stages: int, micro_batches: int
) -> Callable[[Action], bool]:
    middle = range(stages - 1, micro_batches - stages + 1)
    match name:
        case PipelineSchedule.ZB_H1:
            # Nobody waits for what the first run of layers has for its input.
            return lambda action: action.position > 0 and action.micro_batch not in middle
        case PipelineSchedule.ZB_V:
            return lambda action: True
        case _:
            return lambda action: False


def _check(name: PipelineSchedule, *, stages: int, micro_batches: int, chunks: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ConfigError(f"stages={stages} and micro-batches={micro_batches} must be at least 1")
    wanted = {PipelineSchedule.INTERLEAVED: None, PipelineSchedule.ZB_V: 2}.get(name, 1)
    if chunks < 1 or (wanted is not None and chunks != wanted):
        raise ConfigError(
            f"schedule {name.value} has {wanted or 'at least 1'} chunk(s) a stage, not {chunks}; "
            "choose interleaved for any number of chunks"
        )


@dataclasses.dataclass(kw_only=True)
class _ListScheduler:
    stage_of: np.ndarray
    stages: int
    micro_batches: int
    splits: Callable[[Action], bool]  # which backwards are two actions
    capacity: int
    by_chunk_from: int | None
    length: dict[Kind, int]  # in ticks

    def run(self, rule: _Rule) -> list[list[Action | None]]:
        """Rows of the table."""
        positions = len(self.stage_of)
        # Of each run of layers, the micro-batches begun and those done.
        self._begun = {kind: [0] * positions for kind in (_F, _B)}
        self._done = {kind: [0] * positions for kind in (_F, _B)}
        self._split: list[list[int]] = [[] for _ in range(positions)]  # without weight gradient yet
        self._held = [0] * self.stages
        self._last = [Kind.IDLE] * self.stages
        self._mine = [
            [j for j in range(positions) if self.stage_of[j] == stage]
            for stage in range(self.stages)
        ]
        unfinished = positions * self.micro_batches
        current: list[Action | None] = [None] * self.stages
        ticks_left = [0] * self.stages
        rows: list[list[Action | None]] = []
        while unfinished:
            for stage in range(self.stages):
                if current[stage] is None and (action := rule(self._ready(stage))) is not None:
                    current[stage], ticks_left[stage] = action, self.length[action.kind]
                    self._begin(stage, action)
            assert any(current), "the rules leave every stage waiting"
            row: list[Action | None] = [None] * self.stages
            for stage, action in enumerate(current):
                ticks_left[stage] -= 1
                if action is not None and ticks_left[stage] == 0:
                    row[stage], current[stage] = action, None
            for stage, action in enumerate(row):
                if action is not None:
                    frees = self._finish(action)
                    self._held[stage] -= frees
                    unfinished -= frees
            rows.append(row)
        return rows

    def _begin(self, stage: int, action: Action) -> None:
        if action.kind is _W:
            self._split[action.position].remove(action.micro_batch)
            return
        self._last[stage] = kind = _B if action.kind is Kind.INPUT else action.kind
        self._begun[kind][action.position] += 1
        self._held[stage] += kind is _F

    def _finish(self, action: Action) -> bool:
        """Whether it frees its chunk's activations."""
        kind = _B if action.kind is Kind.INPUT else action.kind
        if kind is not _W:
            self._done[kind][action.position] += 1
        if action.kind is Kind.INPUT:
            self._split[action.position].append(action.micro_batch)
        return action.kind in (_B, _W)

    def _ready(self, stage: int) -> _Ready:
        mine, forward = self._mine[stage], self._begun[_F]
        actions: dict[Kind, Action] = {}
        if self._held[stage] < self.capacity:
            # The deepest chunk, for its backward comes first.
            fits = [j for j in mine if self._has_input(_F, j)]
            if fits:
                actions[_F] = self._action(_F, max(fits))
        fits = [j for j in mine if self._has_input(_B, j)]
        if fits:
            action = self._action(_B, min(fits, key=self._backward_order))
            if self.splits(action):
                action = dataclasses.replace(action, kind=Kind.INPUT)
            actions[_B] = action
        waiting = [(self._split[j][0], -j) for j in mine if self._split[j]]
        if waiting:
            i, j = min(waiting)
            actions[_W] = Action(kind=_W, micro_batch=i, position=-j)
        return _Ready(
            last=self._last[stage],
            forwards_done=all(forward[j] == self.micro_batches for j in mine),
            actions=actions,
        )

    def _has_input(self, kind: Kind, j: int) -> bool:
        i = self._begun[kind][j]
        if kind is _F:
            return i < (self.micro_batches if j == 0 else self._done[_F][j - 1])
        last = j == len(self.stage_of) - 1
        return i < self._done[_F][j] and (last or i < self._done[_B][j + 1])

    def _backward_order(self, j: int) -> tuple[int, int]:
        """Oldest micro-batch first, deepest chunk first among equals."""
        i = self._begun[_B][j]
        if self.by_chunk_from is not None:
            i = min(i, max(self.by_chunk_from, 0))
        return i, -j

    def _action(self, kind: Kind, j: int) -> Action:
        return Action(kind=kind, micro_batch=self._begun[kind][j], position=j)
