"""Measures the bubble of a pipeline from a profiler trace: the times at which each stage worked.

    python -m experiments.bench.training.pipeline --schedules 1f1b --trace trace
    python -m experiments.bench.training.pipeline_trace trace/1f1b-m=16 --picture 1f1b.svg \\
        --out 1f1b.json

A stage works from the first to the last kernel of an action; the rest of the step it waits, sends
or reads what to do next. Kernels are identified by their scope, which they keep only outside
command buffers (``--trace`` compiles without).

Beside the measured bubble stands that of the schedule's table, run with the actions' mean times: a
pipeline of these actions and nothing else.
"""

import argparse
import json
import pathlib
import re
import statistics
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.environment import environment
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.diagnostics.trace import TraceEvent, events_by_device
from jaxinfra.parallel.pipeline.schedule import Kind, make_schedule
from jaxinfra.parallel.pipeline.tick_program import make_tick_program, run

_SCOPE = re.compile(r"/(forward|backward|input|weight|exchange)/")
_COLOURS = {"forward": "#0072b2", "backward": "#00654a", "input": "#009e73", "weight": "#e69f00"}
_LONG_NS = 1e5
"""Shorter runs of kernels are an idle stage looking at its table."""


def intervals(events: list[TraceEvent]) -> list[tuple[str, float, float]]:
    """(scope, start, end) of each run of kernels of one scope.

    Kernels that XLA added have no scope and belong to the run around them. Every tick asks for each
    kind of action whether it is due, so two actions of one kind never touch.
    """
    found: list[tuple[str, float, float]] = []
    for event in events:
        match = _SCOPE.search(event.op_name)
        if match is None:
            continue
        if found and found[-1][0] == match.group(1):
            found[-1] = (found[-1][0], found[-1][1], max(found[-1][2], event.end_ns))
        else:
            found.append((match.group(1), event.start_ns, event.end_ns))
    return found


def summarize(trace: pathlib.Path, stages: int) -> dict[str, Any]:
    """Milliseconds by stage, and the intervals from the first kernel of the step on."""
    traced = events_by_device(trace)
    by_stage = [intervals(traced[stage]) for stage in range(stages)]
    start = min(spans[0][1] for spans in by_stage)
    end = max(spans[-1][2] for spans in by_stage)
    rows: list[dict[str, Any]] = []
    for spans in by_stage:
        actions = [s for s in spans if s[0] != "exchange" and s[2] - s[1] > _LONG_NS]
        work_ns = sum(b - a for _, a, b in actions)
        exchange_ns = sum(b - a for scope, a, b in spans if scope == "exchange")
        kinds = {scope for scope, _, _ in actions}
        rows.append(
            {
                "work_ms": work_ns / 1e6,
                "exchange_ms": exchange_ns / 1e6,  # most of it waiting for the other side
                "idle_ms": (end - start - work_ns) / 1e6,
                "mean_ms": {
                    kind: sum(b - a for k, a, b in actions if k == kind)
                    / sum(k == kind for k, _, _ in actions)
                    / 1e6
                    for kind in sorted(kinds)
                },
                "actions": [
                    [k, round((a - start) / 1e6, 3), round((b - start) / 1e6, 3)]
                    for k, a, b in actions
                ],
            }
        )
    step_ms = (end - start) / 1e6
    busiest_ms = max(row["work_ms"] for row in rows)
    return {"step_ms": step_ms, "bubble": step_ms / busiest_ms - 1.0, "stages": rows}


def table_bubble(
    rows: list[dict[str, Any]], *, schedule: str, micro_batches: int, chunks: int
) -> float:
    """The bubble of the table with the mean times of the first stages, and the last one's loss."""
    kinds = {Kind[name.upper()] for row in rows for name in row["mean_ms"]}
    durations = {
        kind: statistics.mean(
            row["mean_ms"][kind.name.lower()]
            for row in rows[:-1]
            if kind.name.lower() in row["mean_ms"]
        )
        for kind in kinds
    }
    pipeline = PipelineConfig(schedule=PipelineSchedule(schedule), chunks=chunks)
    table = make_schedule(
        pipeline.schedule,
        stages=len(rows),
        micro_batches=micro_batches,
        chunks=pipeline.chunks_per_stage,
        backward_ticks=pipeline.backward_ticks,
    )
    head = rows[-1]["mean_ms"]["forward"] - durations[Kind.FORWARD]
    return run(make_tick_program(table), durations=durations, head=head).bubble


def draw(result: dict[str, Any], file: pathlib.Path) -> None:
    """Stages from top to bottom, milliseconds to the right."""
    figure = Figure(figsize=(14, 0.5 * len(result["stages"]) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for stage, row in enumerate(result["stages"]):
        for kind, colour in _COLOURS.items():
            spans = [(a, b - a) for k, a, b in row["actions"] if k == kind]
            axes.broken_barh(
                spans, (stage + 0.06, 0.88), facecolor=colour, edgecolor="white", linewidth=0.4
            )
    axes.set_xlim(0, result["step_ms"])
    axes.set_ylim(len(result["stages"]), 0)
    axes.set_yticks([stage + 0.5 for stage in range(len(result["stages"]))])
    axes.set_yticklabels([f"stage {stage}" for stage in range(len(result["stages"]))])
    axes.set_xlabel("ms")
    axes.set_title(f"measured: {result['step_ms']:.0f} ms, bubble {result['bubble']:.1%}")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=pathlib.Path, help="as --trace names it: 1f1b-m=16")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=2, help="a stage, interleaved")
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    schedule, micro_batches = args.trace.name.split("-m=")
    result = summarize(args.trace, args.stages)
    result["table_bubble"] = table_bubble(
        result["stages"], schedule=schedule, micro_batches=int(micro_batches), chunks=args.chunks
    )
    print(
        f"{args.trace}: {result['step_ms']:.1f} ms, bubble {result['bubble']:.3f}, by the table "
        f"with these times {result['table_bubble']:.3f}"
    )
    for stage, row in enumerate(result["stages"]):
        means = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row["mean_ms"].items())
        print(
            f"stage {stage}: {len(row['actions'])} actions, work {row['work_ms']:.1f} ms, "
            f"idle {row['idle_ms']:.1f} ms, exchange {row['exchange_ms']:.1f} ms; mean ms: {means}"
        )
    if args.picture:
        draw(result, args.picture)
    if args.out:
        traced = json.loads((args.trace / "environment.json").read_text())
        report = {"environment": traced, "read_by": environment()["command"], **result}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
