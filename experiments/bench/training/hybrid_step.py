"""Training steps of a hybrid model beside those of the same model with attention in every layer.

    python -m experiments.bench.training.hybrid_step \\
        --out experiments/results/hybrid-step-h200.json

Qwen3.5's 9B shapes, cut to --layers: three layers of the gated delta rule to one of attention,
against attention everywhere. Both have bf16 operands, fp32 weights and moments, and the same
recomputation. A row's time is the median of steps that follow one another, of its FLOPs those of
``training_flops_per_token`` count (a state is read and written once per token; recomputation does
not count). "of_attention" are the hybrid model's tokens/s and MFU over those of the other.
"""

import concurrent.futures
import dataclasses
import functools
import gc
from typing import Any

import jax

from experiments.bench.harness import options, table_of
from experiments.bench.serving.decode import qwen35_9b
from experiments.bench.training.step_programs import Contender, Program, data, ours
from jaxinfra.config.model import GroupedAttentionConfig, ModelConfig, stacked
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.devices import device_peak

SHAPES = {"2 x 8192": (2, 8192), "1 x 32768": (1, 32768)}


def models(num_layers: int) -> dict[str, ModelConfig]:
    """The hybrid model, and the one whose layers all have its attention."""
    hybrid = qwen35_9b().with_layers(num_layers)
    (attention,) = {b for b in hybrid.blocks if isinstance(b.mixer, GroupedAttentionConfig)}
    same = stacked(attention, num_layers=num_layers)
    return {"hybrid": hybrid, "attention": dataclasses.replace(hybrid, stacks=same)}


def compiled(config: ModelConfig, batch: int, length: int, remat: str) -> Program:
    """The step of a model, unrolled over one repetition of its pattern."""
    return ours(config, batch=batch, length=length, remat=remat, attention="auto")


def row(program: Program, config: ModelConfig, batch: int, length: int, steps: int) -> dict:
    """Time of a step, tokens/s and MFU."""
    contender = Contender.of(program, *data(config, batch=batch, length=length))
    seconds = min(contender.time_steps(steps) for _ in range(2))
    flops = training_flops_per_token(define_model(config, execution_on()), length)
    peak = device_peak(jax.devices()[0].device_kind)
    return {
        "ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(batch * length / seconds),
        "mfu": round(flops * batch * length / seconds / peak.bf16_flops, 4) if peak else None,
        "temp_gib": round(program.temp_bytes / 2**30, 2),
        "loss": contender.losses[-1],
    }


def ratios(of: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The hybrid model's rates over the other's."""
    both = of["hybrid"], of["attention"]
    return {key: round(both[0][key] / both[1][key], 3) for key in ("tokens_per_s", "mfu")}


def main() -> None:
    parser = options(__doc__, budget=200.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    table, configs = table_of(args), models(args.layers)
    shapes = {name: shape for name, shape in SHAPES.items() if name.startswith(tuple(args.only))}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        programs = {
            (name, kind): pool.submit(compiled, config, *shape, args.remat)
            for name, shape in shapes.items()
            for kind, config in configs.items()
        }
    for name, shape in shapes.items():
        found = {}
        for kind, config in configs.items():
            program = programs.pop((name, kind)).result()
            measure = functools.partial(row, program, config, *shape, args.steps)
            found[kind] = table.add(f"{name}, {kind}", measure)
            gc.collect()
        if all(each.get("ms") for each in found.values()):
            table.add(f"{name}, of_attention", functools.partial(ratios, found))


if __name__ == "__main__":
    main()
