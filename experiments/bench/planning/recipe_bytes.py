"""Bytes per parameter of each published recipe's settings: of arrays, as planned, as compiled.

python -m experiments.bench.planning.recipe_bytes --out experiments/results/recipe-bytes-h200.json

The step is compiled for an H200 that need not be there (the extra ``cuda``), of a model so wide for
so few tokens that parameters are nearly all of its memory. What XLA allocates beyond the arrays are
copies and what is being computed when memory is fullest.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import jax

from experiments.bench.environment import environment
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.diagnostics.memory.per_parameter import bytes_per_parameter
from jaxinfra.diagnostics.memory.report import report_memory
from jaxinfra.ops.target import compiling_for
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.formats import CORRESPONDENCES, RECIPES, Correspondence
from jaxinfra.planning.gpu_target import compile_only_devices
from jaxinfra.training.job import lower_step, make_job

LEAST_PART = 0.05
"""Bytes per parameter: smaller parts are not listed."""
_MODEL = (
    "optimizer.muon=none",
    "model.vocab_size=256",
    "model.model_dim=512",
    "model.max_positions=128",
    "model.stacks.0.repeats=4",
    "model.stacks.0.pattern.0.feed_forward.hidden_dim=2048",
    "model.stacks.0.pattern.0.mixer.num_q_heads=8",
    "model.stacks.0.pattern.0.mixer.num_kv_heads=8",
    "model.stacks.0.pattern.0.mixer.head_dim=64",
    "training.batch_size=2",
    "training.sequence_length=128",
    "training.remat=full",
    "training.attention=xla",
)


def main() -> None:
    """Compiles one step for each recipe; writes the JSON as it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--unroll", type=int, default=1, help="layers in one body of their loop")
    parser.add_argument("--only", nargs="*", help="names of published recipes")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for each in CORRESPONDENCES:
        if args.only is None or each.published in args.only:
            rows.append(measured(each, unroll=args.unroll))
            print(json.dumps(rows[-1]), flush=True)
            result = {"environment": environment(), "compiled_for": "H200", "unroll": args.unroll}
            result["rows"] = rows
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(each: Correspondence, *, unroll: int) -> dict[str, Any]:
    """A recipe's bytes per parameter, by role."""
    settings = [*_MODEL, f"training.unroll={unroll}", *each.settings]
    config = codec.override(run_preset("tiny"), settings)
    devices, facts = compile_only_devices(find_device("h200"), 1)
    with compiling_for(facts):
        job = make_job(config, devices=devices)
        report = report_memory(lower_step(job, platforms=("cuda",)))
        arrays = bytes_per_parameter(job)
    count = sum(leaf.size for leaf in jax.tree.leaves(job.model.shapes))

    def share(size: int) -> float:
        return round(size / count, 3)

    return {
        "published": dataclasses.asdict(RECIPES[each.published]),
        "planned": dataclasses.asdict(RECIPES[each.ours]),
        "settings": each.settings,
        "arrays": dataclasses.asdict(arrays) | {"total": arrays.total},
        "compiled": {
            "total": share(report.total_bytes),
            "by_role": {role: share(size) for role, size in report.by_role().items()},
            "parts": [
                {"role": part.role, "name": part.name, "bytes": share(part.bytes)}
                for part in report.parts
                if part.bytes >= LEAST_PART * count
            ],
            "fullest_in": report.peak_scope,
        },
        "parameters": count,
    }


if __name__ == "__main__":
    main()
