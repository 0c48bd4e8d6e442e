"""The training step with projections in 8 bits beside the bf16 one, in one process.

python -m experiments.bench.training.fp8_step --out experiments/results/fp8-step-h200.json
python -m experiments.bench.training.fp8_step --preset tiny --layers 2 --batch 1 \\
    --length 256 # on a CPU

All contenders advance the same parameters and moments in turn, since two copies of an 8B-shaped
state do not fit: times are of equal shapes, and losses are not compared here (``step_curve
--recipes`` does that).
"""

import argparse
import json
import pathlib
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from experiments.bench.environment import clocks, environment
from experiments.bench.training.step_programs import (
    Program,
    SharedState,
    data,
    ours,
    without_rope_scaling,
)
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scaling
from jaxinfra.config.presets import MODELS
from jaxinfra.diagnostics.trace import events_by_device
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.xla_options import Options

CONTENDERS: dict[str, Fp8Matmuls | None] = {
    "bf16": None,
    **{each.value: Fp8Matmuls(scaling=each) for each in Fp8Scaling},
}
# A trace would name a whole CUDA graph where it should name the operation and its scope.
TRACEABLE: Options = {"xla_gpu_enable_command_buffer": ""}


def main() -> None:
    """Compiles, times interleaved steps, traces; writes the JSON after each part."""
    args = _arguments()
    config = without_rope_scaling(MODELS[args.preset]())
    config = config.with_layers(args.layers or config.num_layers)
    sizes = {"batch": args.batch, "length": args.length}
    flops = training_flops_per_token(define_model(config, execution_on()), args.length)
    flops *= args.batch * args.length
    programs: dict[str, Program] = {}
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    result["shapes"] = {"preset": args.preset, "layers": config.num_layers, **sizes}
    for name, made in _compiled(config, sizes, args).items():
        if isinstance(made, Exception):
            result["rows"].append({"name": name, "error": str(made)[:300]})
            print(f"{name}: FAILED {str(made)[:300]}", flush=True)
            continue
        programs[name] = made
        print(f"{name}: compiled in {made.compile_s:.1f} s", flush=True)
    shared = SharedState(programs, data(config, **sizes))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name in programs:
            seconds[name].append(shared.time_steps(name, args.steps))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, program in programs.items():
        row = {
            "name": name,
            "program": program.name,
            "ms": 1e3 * medians[name],
            "rounds_ms": [1e3 * each for each in seconds[name]],
            "tflops": flops / medians[name] / 1e12,
            "of_bf16": medians["bf16"] / medians[name] if "bf16" in medians else None,
            "temp_gib": program.temp_bytes / 2**30,
        }
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
    result["clocks_after"] = clocks()
    _write(result, args.out)
    for name in (each for each in args.traced if each in programs):
        result.setdefault("traces", {})[name] = _trace(shared, name, args.trace / name)
        _write(result, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama3_8b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--unroll", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="a measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--contenders", nargs="+", default=["bf16", "blocks"], choices=list(CONTENDERS)
    )
    parser.add_argument("--trace", type=pathlib.Path, help="directory of traces")
    parser.add_argument("--traced", nargs="*", default=[], choices=list(CONTENDERS))
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    return parser.parse_args()


def _compiled(
    config: ModelConfig, sizes: dict[str, Any], args: argparse.Namespace
) -> dict[str, Program | Exception]:
    """Each contender's program, or what went wrong; all are compiled at once."""

    def compiled(name: str) -> Program | Exception:
        try:
            return ours(
                config,
                **sizes,
                remat=args.remat,
                attention="auto",
                unroll=args.unroll,
                fp8=CONTENDERS[name],
                options=TRACEABLE if args.trace else None,
            )
        except (RuntimeError, ValueError, NotImplementedError) as error:  # a row, not the end
            return error

    with ThreadPoolExecutor(len(args.contenders)) as pool:
        return dict(zip(args.contenders, pool.map(compiled, args.contenders), strict=True))


def _trace(shared: SharedState, name: str, directory: pathlib.Path) -> dict[str, Any]:
    """Milliseconds per step by scope and of the quantizing kernels, and the longest kernels.
    Quantizing kernels include SwiGLU's gradient where one kernel does both.
    """
    steps = 2
    with jax.profiler.trace(str(directory)):
        for _ in range(steps):
            jax.block_until_ready(shared.advance(name))
    found = explain(events_by_device(directory)[0], steps=steps)
    print(name, {k: round(ms, 2) for k, ms in found.by_scope().items()}, flush=True)
    quantizing = sum(each.ms for each in found.kernels if "quantize" in each.kernel)
    return {"quantizing_ms": quantizing} | found.as_json(top=60)


def _write(result: dict[str, Any], out: pathlib.Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
