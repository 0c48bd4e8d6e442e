"""Generates schedules: one list scheduler on a grid of unit times, a few rules for each kind.

Every stage takes, tick by tick, the action its rule prefers among those whose inputs are there and
whose memory is: ``capacity`` bounds the chunks that a stage holds between their forward and the
action that frees them.

All but GPipe hold at most ``stages * chunks`` chunks, the activations of ``stages`` whole stages,
for any number of micro-batches. For 1F1B and the zero-bubble schedules that is what their authors
need; interleaved 1F1B as published (Narayanan et al. 2021, section 2.2) holds
``stages * (chunks + 1) - 1``. Here a stage alternates forward and backward from its first backward
on, starts the deepest chunk that it can, and works off the last ``stages`` micro-batches chunk by
chunk: the same bubble, in less memory, and independent of the number of micro-batches.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.core.errors import ConfigError
from jaxinfra.parallel.pipeline.schedule import Action, Kind, Schedule, violations


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """What one stage could do next."""

    last: Kind  # what it did last; IDLE before its first action
    forwards_done: bool
    actions: dict[Kind, Action]

    def first(self, *kinds: Kind) -> Action | None:
        return next((self.actions[kind] for kind in kinds if kind in self.actions), None)


type _Rule = Callable[[_Ready], Action | None]

_F, _B, _W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


def _forwards_first(ready: _Ready) -> Action | None:
    return ready.first(_B) if ready.forwards_done else ready.first(_F)


def _alternate(ready: _Ready) -> Action | None:
    """One forward, one backward; weight gradients only where neither can run."""
    return ready.first(_F, _B, _W) if ready.last is _B else ready.first(_B, _F, _W)


def _cycle(ready: _Ready) -> Action | None:
    """Forward, backward, weight gradient in turn, so that memory is freed at a steady rate."""
    match ready.last:
        case Kind.FORWARD:
            return ready.first(_B, _W, _F)
        case Kind.BACKWARD:
            return ready.first(_F, _W, _B)
        case Kind.WEIGHT:
            return ready.first(_F, _B, _W)
        case _:
            return ready.first(_B, _F, _W)


def make_schedule(
    name: PipelineSchedule,
    *,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    backward_ticks: int = 1,
) -> Schedule:
    """The schedule of that name; raises ConfigError for a number of chunks it does not have.

    Args:
        backward_ticks: how many forwards a backward takes as long as. An order made for 1 loses
            time where that is not so, once stages form a ring: interleaved, each waits for the
            slower of its neighbours in every tick. An action stands in its last tick.
    """
    _check(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    rules = {
        PipelineSchedule.GPIPE: _forwards_first,
        PipelineSchedule.ZB_H1: _cycle,
    }
    is_v = name is PipelineSchedule.ZB_V
    position = np.arange(stages * chunks)
    chunk_of, stage_of = np.divmod(position, stages)
    if is_v:
        stage_of = np.where(chunk_of == 1, stages - 1 - stage_of, stage_of)
    scheduler = _ListScheduler(
        stage_of=stage_of,
        stages=stages,
        micro_batches=micro_batches,
        splits_gradients=name in (PipelineSchedule.ZB_H1, PipelineSchedule.ZB_V),
        capacity=micro_batches if name is PipelineSchedule.GPIPE else stages * chunks,
        # The last micro-batches are worked off chunk by chunk: nothing else hides their way back.
        by_chunk_from=micro_batches - stages if name is PipelineSchedule.INTERLEAVED else None,
        length={_F: 1, _B: backward_ticks, _W: 1},
    )
    rows = scheduler.run(rules.get(name, _alternate))
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
        splits_gradients=scheduler.splits_gradients,
        stage_of=stage_of.astype(np.int32),
        chunk_of=chunk_of.astype(np.int32),
        **tables,
    )
    assert not violations(schedule)
    return schedule


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
    splits_gradients: bool
    capacity: int
    by_chunk_from: int | None
    length: dict[Kind, int]  # in ticks

    def run(self, rule: _Rule) -> list[list[Action | None]]:
        """Rows of the table."""
        positions = len(self.stage_of)
        # Of each kind and run of layers, the micro-batches begun and those done.
        self._begun = {kind: [0] * positions for kind in (_F, _B, _W)}
        self._done = {kind: [0] * positions for kind in (_F, _B, _W)}
        self._held = [0] * self.stages
        self._last = [Kind.IDLE] * self.stages
        self._mine = [
            [j for j in range(positions) if self.stage_of[j] == stage]
            for stage in range(self.stages)
        ]
        final = _W if self.splits_gradients else _B
        current: list[Action | None] = [None] * self.stages
        ticks_left = [0] * self.stages
        rows: list[list[Action | None]] = []
        while min(self._done[final]) < self.micro_batches:
            for stage in range(self.stages):
                if current[stage] is None and (action := rule(self._ready(stage))) is not None:
                    current[stage], ticks_left[stage] = action, self.length[action.kind]
                    self._begun[action.kind][action.position] += 1
                    self._held[stage] += action.kind is _F
                    self._last[stage] = action.kind
            assert any(current), "the rules leave every stage waiting"
            row: list[Action | None] = [None] * self.stages
            for stage, action in enumerate(current):
                ticks_left[stage] -= 1
                if action is not None and ticks_left[stage] == 0:
                    row[stage], current[stage] = action, None
            for stage, action in enumerate(row):
                if action is not None:
                    self._done[action.kind][action.position] += 1
                    self._held[stage] -= action.kind is final
            rows.append(row)
        return rows

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
            actions[_B] = self._action(_B, min(fits, key=self._backward_order))
        if self.splits_gradients:
            fits = [j for j in mine if self._begun[_W][j] < self._done[_B][j]]
            if fits:
                actions[_W] = self._action(_W, min(fits, key=self._backward_order))
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
