"""Explain a profiler trace: what delays a step, and which kernels take longest.

jaxinfra train ... --profile 20:23
jaxinfra trace runs/small-1                delays of its step, and remedies
jaxinfra trace runs/small-1 runs/small-2   why the second takes longer or shorter than the first
jaxinfra trace runs/small-1 --rank 3       tables of another rank; all ranks are compared
jaxinfra trace --example                   a trace that comes with jaxinfra
"""

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli.price import step_plan
from jaxinfra.diagnostics.delays import Explanation, device_delays, device_times, explain_step
from jaxinfra.diagnostics.difference import compare_steps, predicted_beside_measured
from jaxinfra.diagnostics.traced_run import TracedRun, read_traced_run
from jaxinfra.diagnostics.waterfall import EXAMPLE, IDLE, Waterfall, draw
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.runtime.files import read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra trace``."""
    parser.add_argument("directory", nargs="?", type=Path, help="run, or a directory with a trace")
    parser.add_argument("second", nargs="?", type=Path, help="another run to compare with")
    parser.add_argument(
        "--example",
        action="store_true",
        help="use the included trace of four H200s (fsdp=2,tensor=2)",
    )
    parser.add_argument("--rank", type=int, default=0, help="process to show (default: 0)")
    parser.add_argument("--device", type=int, default=0, help="GPU of that process (default: 0)")
    parser.add_argument("--steps", type=int, help="traced steps (default: found from the trace)")
    parser.add_argument("--top", type=int, default=12, help="kernels to list (default: 12)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the step's time")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Reads the newest trace and prints a step's delays and tables, or JSON."""
    if args.example == (args.directory is not None):
        raise ConfigError("name a run, or give --example: one of them")
    if args.example:
        return _show_example(args)
    if args.second is not None:
        first, second = (_traced(args, each) for each in (args.directory, args.second))
        found = compare_steps(first.waterfall, second.waterfall, first.step, second.step)
        text = json.dumps(dataclasses.asdict(found), indent=1) if args.json else found.paragraph()
        print(text)
        return 0
    try:
        traced = _traced(args, args.directory)
    except DataError:
        explained = explain_step(args.directory)
        if explained is None or args.picture is not None:
            raise  # the run's own records do not tell
        whole = {"explanation": dataclasses.asdict(explained)}
        print(json.dumps(whole, indent=1) if args.json else explained.paragraph())
        return 0
    return _show(args, traced)


def _show(args: argparse.Namespace, traced: TracedRun) -> int:
    explained = explain_step(args.directory, traced)
    assert explained is not None, "a trace has a step"
    times, parts = device_times(traced.by_device), _parts(args.directory, traced)
    if args.picture is not None:
        draw(traced.waterfall, args.picture)
    if args.json:
        more = {"devices": [dataclasses.asdict(each) for each in times], "parts_ms": parts}
        tables = traced.waterfall.as_json(top=args.top) | more
        print(json.dumps({"explanation": dataclasses.asdict(explained), **tables}, indent=1))
        return 0
    print(explained.paragraph())
    _print(traced.waterfall, top=args.top)
    console = Console()
    if parts:
        table = Table("part", "ms predicted", "ms measured")
        for name, both in parts.items():
            table.add_row(name, *(f"{ms:.2f}" for ms in both))
        console.print(table)
    if len(times) > 1:
        table = Table("device", "ms computing", "ms idle", "ms waiting in communication")
        for each in times:
            cells = (each.computing_ms, each.idle_ms, each.waiting_ms)
            table.add_row(each.name, *(f"{ms:.2f}" for ms in cells))
        console.print(table)
    return 0


def _parts(directory: Path, traced: TracedRun) -> dict[str, tuple[float, float]]:
    """Returns a run's predicted step beside its trace; empty if the planner cannot predict it."""
    run = RunDirectory(directory)
    if traced.step is None or not run.config_file.is_file():
        return {}
    plan = step_plan(run.read_config(), traced.step["device_kind"])
    return {} if plan is None else predicted_beside_measured(plan.time.parts, traced.waterfall)


def _show_example(args: argparse.Namespace) -> int:
    found = Waterfall.of_json(read_json(EXAMPLE))
    delays = sorted(device_delays(found), key=lambda each: -each.ms)
    explained = Explanation(step_ms=found.span_ms, delays=tuple(delays))
    if args.picture is not None:
        draw(found, args.picture)
    if args.json:
        whole = {"explanation": dataclasses.asdict(explained), **found.as_json(top=args.top)}
        print(json.dumps(whole, indent=1))
    else:
        print(explained.paragraph())
        _print(found, top=args.top)
    return 0


def _traced(args: argparse.Namespace, directory: Path) -> TracedRun:
    return read_traced_run(directory, rank=args.rank, device=args.device, steps=args.steps)


def _print(found: Waterfall, *, top: int) -> None:
    console = Console()
    console.print(f"{found.span_ms:.2f} ms per step, {found.steps} steps")
    by_kind = found.by_kind()
    kinds = Table("kind", "ms that delay the step", "share", "ms hidden under others", title="")
    for kind, ms in sorted(by_kind.items(), key=lambda item: -item[1]):
        hidden = "" if kind == IDLE else f"{found.total_ms[kind] - ms:.2f}"
        kinds.add_row(kind, f"{ms:.2f}", f"{ms / found.span_ms:.1%}", hidden)
    for kind in found.total_ms.keys() - by_kind.keys():
        kinds.add_row(kind, "0.00", "0.0%", f"{found.total_ms[kind]:.2f}")
    scopes = Table("scope", "ms", "share")
    for scope, ms in found.by_scope().items():
        scopes.add_row(scope, f"{ms:.2f}", f"{ms / found.span_ms:.1%}")
    kernels = Table("ms", "launches", "scope", "kind", "kernel")
    for each in found.kernels[:top]:
        kernels.add_row(
            f"{each.ms:.2f}", str(each.launches), each.scope, each.kind, each.kernel[:60]
        )
    axes = Table("communication over", "ms exposed", "ms hidden", "launches", "GB sent", "GB/s")
    for name, time in found.by_axis.items():
        sent, rate = time.sent_bytes, time.sent_gb_per_s
        axes.add_row(
            name,
            f"{time.exposed_ms:.2f}",
            f"{time.hidden_ms:.2f}",
            f"{time.launches:g}",
            "" if sent is None else f"{sent / 1e9:.3f}",
            "" if rate is None else f"{rate:.0f}",
        )
    for table in (kinds, *([axes] if found.by_axis else []), scopes, kernels):
        console.print(table)
