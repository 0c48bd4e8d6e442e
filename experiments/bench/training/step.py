"""Ours beside the plain-JAX step: same shapes, same initial weights, same data, one process.

    python -m experiments.bench.training.step                   # Llama-3.2-1B shapes, one GPU
    python -m experiments.bench.training.step                   # on a CPU: tiny, 2 x 128 tokens
    python -m experiments.bench.training.step --preset llama3_8b --layers 16 --batch 2 \\
        --length 8192 \\
        --remat dots --unroll 16 --plain-remat         # 8B shapes, as many layers as fit

Variants run first, each alone; then the best of each side, and ours with the least memory,
alternate, so that clocks and temperature hit all alike. Figures are medians over alternations. MFU
is ``training_flops_per_token`` (jaxinfra/model/flops.py: 6 per matmul parameter and 12 per
query-key-width triple that causality leaves, recomputation not counted) times tokens/s, of the
device's dense bf16 peak.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.training.step_programs import (
    Contender,
    Program,
    data,
    ours,
    plain,
    without_rope_scaling,
)
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets import MODELS
from jaxinfra.diagnostics.trace import events_by_device
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.devices import device_peak
from jaxinfra.training.xla_options import Options, describe_options, parse_options

type Maker = Callable[[Options], Program]
"""Compiles a variant, under XLA options beside its own."""

# A trace would name a whole CUDA graph where it should name the operation and its scope.
TRACEABLE: Options = {"xla_gpu_enable_command_buffer": ""}


def main() -> None:
    """Runs the comparison, prints the table and writes the JSON."""
    args = _arguments()
    _require_size(args)
    config = without_rope_scaling(MODELS[args.preset]())
    config = config.with_layers(args.layers or config.num_layers)
    bench = _Bench.of(config, args)
    rows: list[dict[str, Any]] = []
    programs: dict[str, list[tuple[float, Program]]] = {"plain": [], "ours": []}
    makers: dict[str, Maker] = {}
    for side, make in _variants(config, args):
        try:
            program = make({})
            contender = bench.contender(program)
            seconds = contender.time_steps(args.steps)
        except (RuntimeError, ValueError) as error:  # one variant's failure is a row, not the end
            rows.append({"side": side, "error": str(error)[:300]})
            print(f"{side}: FAILED {str(error)[:300]}", flush=True)
            continue
        rows.append(bench.row(side, contender, seconds))
        programs[side].append((seconds, program))
        makers[program.name] = make
        del contender
    result = {
        "environment": environment(),
        "shapes": {"preset": args.preset, "layers": config.num_layers, **bench.sizes},
        "num_parameters": bench.num_parameters,
        "flops_per_token": bench.flops_per_token,
        "variants": rows,
    }
    chosen = {s: min(found, key=lambda row: row[0])[1] for s, found in programs.items() if found}
    if found := programs["ours"]:
        least = min((program for _, program in found), key=lambda program: program.temp_bytes)
        if least is not chosen["ours"]:
            chosen["ours, least memory"] = least
    del programs
    if args.rounds:
        result["alternating"] = _alternate(chosen, bench, args)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    if args.trace is not None:
        result["traces"] = {
            side: _trace(bench.contender(_traceable(program, makers)), args.trace / side)
            for side, program in chosen.items()
            if side in ("ours", "plain")
        }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def _require_size(args: argparse.Namespace) -> None:
    """Sizes that were not named: those of the published results, or on a CPU what one can do."""
    on_cpu = jax.default_backend() == "cpu"
    defaults = (
        {"preset": "tiny", "batch": 2, "length": 128}
        if on_cpu
        else {"preset": "llama32_1b", "batch": 4, "length": 4096}
    )
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if on_cpu:
        sizes = f"{args.preset}, {args.batch} x {args.length} tokens"
        print(f"on a CPU: {sizes}; times of a GPU need one", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jaxinfra bench step", description=__doc__)
    parser.add_argument("--preset", choices=sorted(MODELS), help="llama32_1b, on a CPU tiny")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--batch", type=int, help="sequences: 4, on a CPU 2")
    parser.add_argument("--length", type=int, help="tokens of each: 4096, on a CPU 128")
    parser.add_argument("--steps", type=int, default=10, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="alternations; 0: none")
    parser.add_argument("--remat", nargs="+", default=["none", "mlp"], help="ours")
    parser.add_argument("--unroll", nargs="+", type=int, default=[16], help="layers a loop body")
    parser.add_argument("--plain-remat", nargs="*", default=["dots"])
    parser.add_argument("--attention", nargs="+", default=["auto"])
    parser.add_argument("--weight-gradients", nargs="+", default=["fp32"])
    parser.add_argument(
        "--options",
        nargs="+",
        default=["none"],
        metavar="SET",
        help="XLA options of ours: sets such as name=value,name=value, or none",
    )
    parser.add_argument("--trace", type=pathlib.Path, help="where to trace the best of each side")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="JSON file")
    return parser.parse_args()


def _variants(config: ModelConfig, args: argparse.Namespace) -> list[tuple[str, Maker]]:
    sizes = {"batch": args.batch, "length": args.length}

    def of_plain(extra: Options, *, remat: str) -> Program:
        return plain(config, **sizes, remat=remat, options=extra or None)

    def of_ours(extra: Options, *, options: Options, **settings: Any) -> Program:
        program = ours(config, **sizes, **settings, options=options | extra or None)
        name = f"{program.name} {describe_options(options)}" if options else program.name
        return dataclasses.replace(program, name=name)

    found: list[tuple[str, Maker]] = [
        ("plain", functools.partial(of_plain, remat=remat)) for remat in args.plain_remat
    ]
    for attention, remat, unroll, gradients, settings in itertools.product(
        args.attention, args.remat, args.unroll, args.weight_gradients, args.options
    ):
        make = functools.partial(
            of_ours,
            attention=attention,
            remat=remat,
            unroll=unroll,
            weight_gradients=gradients,
            options={} if settings == "none" else parse_options(settings.split(",")),
        )
        found.append(("ours", make))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bench:
    """Configuration that all variants share."""

    config: ModelConfig
    sizes: dict[str, int]
    num_parameters: int
    flops_per_token: float

    @classmethod
    def of(cls, config: ModelConfig, args: argparse.Namespace) -> "_Bench":
        model = define_model(config, execution_on())
        return cls(
            config=config,
            sizes={"batch": args.batch, "length": args.length},
            num_parameters=model.num_parameters,
            flops_per_token=training_flops_per_token(model, args.length),
        )

    def contender(self, program: Program) -> Contender:
        return Contender.of(program, *data(self.config, **self.sizes))

    def row(self, side: str, contender: Contender, seconds: float) -> dict[str, Any]:
        tokens = self.sizes["batch"] * self.sizes["length"]
        flops = self.flops_per_token * tokens / seconds
        peak = device_peak(jax.devices()[0].device_kind)
        row = {
            "side": side,
            "name": contender.program.name,
            "ms": seconds * 1e3,
            "tflops": flops / 1e12,
            "mfu": flops / peak.bf16_flops if peak else None,
            "tokens_per_s": tokens / seconds,
            "temp_gib": contender.program.temp_bytes / 2**30,
            "compile_s": contender.program.compile_s,
            "first_loss": contender.losses[0],
            "last_loss": contender.losses[-1],
        }
        print(
            f"{row['name']:40s} {row['ms']:9.2f} ms {row['tflops']:7.1f} TFLOP/s "
            f"MFU {row['mfu'] or 0:.1%} {row['tokens_per_s']:9.0f} tokens/s "
            f"temp {row['temp_gib']:5.2f} GiB compile {row['compile_s']:5.1f} s "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}",
            flush=True,
        )
        return row


def _alternate(
    chosen: dict[str, Program], bench: _Bench, args: argparse.Namespace
) -> dict[str, Any]:
    contenders = {side: bench.contender(program) for side, program in chosen.items()}
    seconds: dict[str, list[float]] = {side: [] for side in contenders}
    for _ in range(args.rounds):
        for side, contender in contenders.items():
            seconds[side].append(contender.time_steps(args.steps))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    result: dict[str, Any] = {
        "rows": {s: bench.row(s, contenders[s], medians[s]) for s in contenders},
        "rounds_ms": {side: [1e3 * s for s in values] for side, values in seconds.items()},
        "losses": {side: contenders[side].losses for side in contenders},
        "clocks_after": clocks(),
    }
    for side in [s for s in contenders if s != "plain" and "plain" in contenders]:
        losses = [np.asarray(contenders[s].losses) for s in ("plain", side)]
        ratio = medians["plain"] / medians[side]
        memory = contenders[side].program.temp_bytes / contenders["plain"].program.temp_bytes
        difference = float(np.max(np.abs(losses[0] - losses[1])))
        result[f"{side} / plain"] = {
            "speed": ratio,
            "temporaries": memory,
            "largest_loss_difference_nats": difference,
        }
        print(
            f"{side} / plain: {ratio:.3f}x as fast, {memory:.3f} of its temporaries; losses differ "
            f"by at most {difference:.4f} nats",
            flush=True,
        )
    return result


def _traceable(program: Program, makers: dict[str, Maker]) -> Program:
    if describe_options(TRACEABLE) in program.name:
        return program
    return makers[program.name](TRACEABLE)


def _trace(contender: Contender, directory: pathlib.Path) -> dict[str, Any]:
    """Milliseconds per step by scope, and the longest kernels."""
    steps = 3
    with jax.profiler.trace(str(directory)):
        for _ in range(steps):
            jax.block_until_ready(contender.advance())
    found = explain(events_by_device(directory)[0], steps=steps)
    scopes = {k: round(ms, 2) for k, ms in found.by_scope().items()}
    print(contender.program.name, scopes, flush=True)
    return found.as_json(top=60)


if __name__ == "__main__":
    main()
