"""A pipeline schedule as a table: which stage does what at which tick.

A tick is a place in the program, not a duration: a stage that idles in a tick passes it at once,
and stages wait for each other only where one sends to the other.

Dims of tables: [ticks, stages].
"""

import dataclasses
import enum

import numpy as np


class Kind(enum.IntEnum):
    """What a stage does in one tick, to one micro-batch and one of its chunks of layers."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2  # the gradients of the input and of the weights
    INPUT = 3  # of the input alone
    WEIGHT = 4  # of the weights, some time after the input's


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One entry of the table that is not idle."""

    kind: Kind
    micro_batch: int
    position: int  # of the chunk in the model: 0 embeds, the last one projects onto the vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The table, and where each run of layers lives.

    A model is cut into ``num_positions`` equal runs of layers; ``stage_of[j], chunk_of[j]`` is
    where run j lives.
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
        """Rows of the table."""
        return self.kind.shape[0]

    @property
    def num_stages(self) -> int:
        """Devices along the pipe axis."""
        return self.kind.shape[1]

    @property
    def num_positions(self) -> int:
        """Runs of layers of the whole model: stages times chunks."""
        return len(self.stage_of)

    @property
    def num_chunks(self) -> int:
        """Runs of layers that one stage holds."""
        return self.num_positions // self.num_stages

    @property
    def splits_gradients(self) -> bool:
        """Whether some weight gradients are actions of their own."""
        return bool(np.any(self.kind == Kind.WEIGHT))

    @property
    def position(self) -> np.ndarray:
        """Int [stages, chunks]: which run of layers a stage's chunk is."""
        table = np.empty((self.num_stages, self.num_chunks), np.int32)
        table[self.stage_of, self.chunk_of] = np.arange(self.num_positions)
        return table

    def action(self, tick: int, stage: int) -> Action | None:
        """The entry, None where idle."""
        kind = Kind(int(self.kind[tick, stage]))
        if kind is Kind.IDLE:
            return None
        return Action(
            kind=kind,
            micro_batch=int(self.micro_batch[tick, stage]),
            position=int(self.position[stage, self.chunk[tick, stage]]),
        )

    def ticks(self) -> dict[Action, int]:
        """When each action runs; of an action entered twice, the later tick."""
        return {
            action: tick
            for tick in range(self.num_ticks)
            for stage in range(self.num_stages)
            if (action := self.action(tick, stage)) is not None
        }


def violations(schedule: Schedule) -> list[str]:
    """Every broken rule in words; empty for a correct schedule.

    Of every run of layers and micro-batch there is one forward, and one backward or its two halves;
    a forward follows the forward of the run before it, a backward its own forward and the backward
    of the run after it, a weight gradient the gradient of its input.
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
    """What has to be done before, where it exists."""
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
