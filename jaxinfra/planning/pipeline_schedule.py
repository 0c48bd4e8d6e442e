"""Report on a pipeline schedule: idle time (bubble), activation memory and a picture."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.parallel.pipeline.schedule import Kind, make_schedule
from jaxinfra.parallel.pipeline.tick_program import (
    TickProgram,
    Timeline,
    bubble_formula,
    make_tick_program,
    peak_activations,
    run,
)

_COLOURS = {
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#00654a",
    Kind.INPUT: "#009e73",
    Kind.WEIGHT: "#e69f00",
}
_CHUNK_LIGHTENING = 0.45  # of the second chunk of a stage towards white; later ones more


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleReport:
    """Figures of a pipeline schedule, where a backward pass takes as long as two forward passes."""

    schedule: str
    stages: int
    micro_batches: int
    chunks: int
    bubble: float  # idle time over working time
    bubble_formula: float  # the same if forward, input gradient and weight gradient take equal time
    time: float  # in units of one micro-batch's time without a pipeline
    peak_activations: list[float]  # by stage, in units of one stage's for one micro-batch
    picture: str | None

    def lines(self) -> list[str]:
        """Returns the schedule's report as lines of text."""
        peaks = " ".join(f"{peak:g}" for peak in self.peak_activations)
        picture = [] if self.picture is None else [f"picture: {self.picture}"]
        return [
            f"{self.schedule}: {self.stages} stages x {self.chunks} chunks, {self.micro_batches} "
            "micro-batches",
            f"bubble {self.bubble:.1%} of the working time; by the formula, for a forward as long "
            f"as each gradient, {self.bubble_formula:.1%}",
            f"time of {self.time:.2f} micro-batches for {self.micro_batches}",
            f"peak activations by stage, in those of a stage for one micro-batch: {peaks}",
            *picture,
        ]


def report(
    name: PipelineSchedule, *, stages: int, micro_batches: int, chunks: int, out: Path | None
) -> ScheduleReport:
    """Builds a pipeline schedule, checks and measures it, and draws it into ``out`` if given.

    Args:
        chunks: number of layer chunks per stage, in the interleaved schedule.
    """
    pipeline = PipelineConfig(schedule=name, chunks=chunks)
    chunks = pipeline.chunks_per_stage
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    schedule = make_schedule(name, **sizes, backward_ticks=pipeline.backward_ticks)
    program = make_tick_program(schedule)
    timeline = run(program)
    if out is not None:
        draw(program, timeline, out)
    return ScheduleReport(
        schedule=name.value,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        bubble=timeline.bubble,
        bubble_formula=bubble_formula(name, **sizes),
        time=timeline.total / (3 * chunks),
        peak_activations=[float(peak) for peak in peak_activations(schedule)],
        picture=None if out is None else str(out),
    )


def draw(program: TickProgram, timeline: Timeline, file: Path) -> None:
    """Draws a pipeline schedule: a row per stage over time, a box per action and micro-batch."""
    schedule = program.schedule
    width = float(np.clip(timeline.total * 0.22 / schedule.num_chunks**0.5, 8, 40))
    figure = Figure(figsize=(width, 0.45 * schedule.num_stages + 1.4), layout="constrained")
    axes = figure.add_subplot()
    for tick in range(schedule.num_ticks):
        for stage in range(schedule.num_stages):
            _box(axes, program, timeline, tick, stage)
    axes.set_xlim(0, timeline.total)
    axes.set_ylim(schedule.num_stages, 0)
    axes.set_yticks(np.arange(schedule.num_stages) + 0.5)
    axes.set_yticklabels([f"stage {stage}" for stage in range(schedule.num_stages)])
    axes.set_xlabel("time, in forwards of a chunk")
    axes.set_title(
        f"{schedule.name}: {schedule.micro_batches} micro-batches, bubble {timeline.bubble:.1%}"
    )
    names = {
        Kind.FORWARD: "forward",
        Kind.BACKWARD: "backward",
        Kind.INPUT: "input gradient",
        Kind.WEIGHT: "weight gradient",
    }
    kinds = [kind for kind in names if np.any(schedule.kind == kind)]
    several = schedule.num_chunks > 1
    handles: list[Any] = [
        Patch(
            facecolor=_colour(kind, chunk),
            label=f"{names[kind]}, chunk {chunk}" if several else names[kind],
        )
        for kind in kinds
        for chunk in range(schedule.num_chunks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=9)
    partial = file.with_suffix(f".partial{file.suffix or '.png'}")
    figure.savefig(partial, dpi=110)
    partial.rename(file)


def _box(axes: Axes, program: TickProgram, timeline: Timeline, tick: int, stage: int) -> None:
    action = program.schedule.action(tick, stage)
    if action is None:
        return
    start, end = timeline.start[tick, stage], timeline.end[tick, stage]
    chunk = int(program.schedule.chunk[tick, stage])
    axes.add_patch(
        Rectangle(
            (start, stage + 0.06),
            end - start,
            0.88,
            facecolor=_colour(action.kind, chunk),
            edgecolor="white",
            linewidth=0.6,
        )
    )
    axes.text(
        (start + end) / 2,
        stage + 0.5,
        str(action.micro_batch),
        ha="center",
        va="center",
        fontsize=7,
        color="white" if chunk == 0 else "black",
    )


def _colour(kind: Kind, chunk: int) -> tuple[float, float, float]:
    white = 1.0 - (1.0 - _CHUNK_LIGHTENING) ** chunk
    red, green, blue = (part + (1.0 - part) * white for part in to_rgb(_COLOURS[kind]))
    return red, green, blue
