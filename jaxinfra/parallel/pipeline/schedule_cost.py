"""What a schedule costs: its bubble, by formula and by running it, and its memory.

Bubbles are fractions of the time that the same work takes without a pipeline.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.parallel.pipeline.schedule import Kind, Schedule
from jaxinfra.parallel.pipeline.tick_program import TickProgram

UNIT_TIMES: dict[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT: 1.0,
    Kind.WEIGHT: 1.0,
}
"""Forward, gradient of the input and gradient of the weights equally long: products alone."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When everything happens, in the unit of the durations given."""

    start: np.ndarray  # [ticks, stages]
    end: np.ndarray  # [ticks, stages]
    total: float
    bubble: float  # idle over working time of the busiest stage


def run(
    program: TickProgram,
    *,
    durations: Mapping[Kind, float] = UNIT_TIMES,
    embed: float = 0.0,
    head: float = 0.0,
) -> Timeline:
    """Times a program whose stages wait only for those they exchange with.

    Args:
        durations: of one chunk by kind.
        embed: added to the forward and again to the backward of the first run of layers.
        head: added to the forward of the last run of layers, which holds the loss and its gradient.
    """
    schedule = program.schedule
    shape = schedule.kind.shape
    length = np.zeros(shape)
    for kind, duration in durations.items():
        length[schedule.kind == kind] = duration
    position = schedule.position[np.arange(shape[1])[None, :], schedule.chunk]
    forward = schedule.kind == Kind.FORWARD
    length[(schedule.kind != Kind.WEIGHT) & (length > 0) & (position == 0)] += embed
    length[forward & (position == schedule.num_positions - 1)] += head
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
    """Idle over working time where forward, input gradient and weight gradient take equally long.

    (p-1)/m for GPipe and 1F1B; of three equal parts (p-1)/3m in ZB-H1 (Qi et al. 2024, table 2),
    half of that in ZB-V, where it is the time until the last stage begins. (p-1)/(m v) interleaved
    (Narayanan et al. 2021, 2.2): for an order of equal forwards and backwards, else a little more.
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


def held_chunks(schedule: Schedule) -> np.ndarray:
    """Int [ticks, stages]: chunks whose activations a stage holds after each tick."""
    frees = (schedule.kind == Kind.BACKWARD) | (schedule.kind == Kind.WEIGHT)
    return np.cumsum((schedule.kind == Kind.FORWARD).astype(int) - frees, axis=0)


def peak_activations(schedule: Schedule) -> np.ndarray:
    """[stages]: the most activations a stage holds, in those of one stage for one micro-batch."""
    # A chunk holds its activations in the tick that frees them, too.
    return held_chunks(schedule).max(axis=0) / schedule.num_chunks
