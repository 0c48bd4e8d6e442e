"""Repeat one step of a run on one device, and compare it with what the run recorded.

jaxinfra replay runs/small-1 --step 812             does the step reproduce?
jaxinfra replay runs/small-1 --step 812 --samples   also by sample and by layer

For a step that is not finite it finds the first layer, pass and operation that made it so.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfra.diagnostics.bisect import NonFiniteCause, find_nonfinite
from jaxinfra.diagnostics.replay import COMPARED, Replayed, replay_step
from jaxinfra.runtime.files import user_cache
from jaxinfra.training.examine import Examination, examine_step
from jaxinfra.training.metrics import finite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra replay``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1")
    parser.add_argument(
        "--on-mesh", action="store_true", help="use the run's own mesh, so that bits can be equal"
    )
    parser.add_argument(
        "--samples",
        action="store_true",
        help="show the loss by sample and the gradient norm by layer",
    )
    parser.add_argument(
        "--cache", type=Path, help="directory of tokenized texts and programs (default: user cache)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Replays a step of a run; returns 1 if it does not reproduce the recorded values."""
    replayed = replay_step(
        args.run, step=args.step, cache_dir=args.cache or user_cache(), on_mesh=args.on_mesh
    )
    cause = None
    searched = not replayed.is_finite and replayed.job.config.mesh.num_devices == 1
    if searched:
        cause = find_nonfinite(replayed.job, replayed.state, replayed.batch)
    examined = None
    if args.samples:
        examined = examine_step(
            replayed.job,
            replayed.state,
            replayed.batches,
            replayed.corpora.tokenizer,
            step=args.step,
            usual_step=args.step - 1 or 2,
        )
    if args.json:
        shown = _as_json(replayed, cause) | {"examined": examined and examined.as_json()}
        print(json.dumps(shown, allow_nan=False))
        return _code(replayed)
    _print(replayed, cause, searched=searched)
    if examined is not None:
        _print_examined(examined)
    return _code(replayed)


def _code(replayed: Replayed) -> int:
    return 1 if replayed.reproduces is False or replayed.data_differ else 0


def _as_json(replayed: Replayed, cause: NonFiniteCause | None) -> dict[str, Any]:
    recorded = replayed.recorded or {}
    return {
        "step": replayed.step,
        "from_step": replayed.first,
        "verdict": replayed.verdict(),
        "reproduces": replayed.reproduces,
        "recorded": {name: recorded.get(name) for name in COMPARED},
        "replayed": finite({name: replayed.record[name] for name in COMPARED}),
        "tolerances": finite(dict(replayed.tolerances)),
        "not_finite": None if cause is None else cause.as_json(),
    }


def _print_examined(examined: Examination) -> None:
    print(examined.describe())
    samples = Table("sample", "loss", "targets", "documents", "source", "begins")
    for each in examined.samples[:10]:
        start = each.text.replace("\n", " ")[:60]
        samples.add_row(
            *(str(each.sample), f"{each.loss:.4f}", str(each.targets), str(each.documents)),
            *(each.source or "-", start),
        )
    layers = Table("gradient of", "norm", f"step {examined.compared_with}'s", "times")
    for layer in examined.layers:
        layers.add_row(layer.name, f"{layer.norm:.3g}", f"{layer.usual:.3g}", f"{layer.growth:.2f}")
    console = Console(markup=False)  # a text may have brackets
    for table in (samples, layers):
        console.print(table)


def _print(replayed: Replayed, cause: NonFiniteCause | None, *, searched: bool) -> None:
    print(f"step {replayed.step}, {replayed.verdict()}")
    table = Table("", "recorded", "here")
    recorded = replayed.recorded or {}
    for name in COMPARED:
        there = recorded.get(name)
        shown = (
            "not finite" if there is None and recorded else "-" if there is None else repr(there)
        )
        table.add_row(name, shown, repr(replayed.record[name]))
    Console().print(table)
    if cause is not None:
        print(f"not finite: {cause.describe()}")
    elif searched:
        print("not finite in one program, and finite where each layer is computed on its own")
    elif not replayed.is_finite:
        print("not finite: without --on-mesh, on one device, layer and operation are searched")
