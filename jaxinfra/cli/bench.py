"""Run a benchmark: jaxinfra beside the alternatives, in one process.

    jaxinfra bench step --preset llama32_1b
    jaxinfra bench attention

Benchmarks are in the source tree's experiments/bench, with their baselines, and run from a clone.
"""

import argparse
import importlib.util
import runpy
import sys

from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.files import user_cache

ROOMS = {
    "training": {
        "step": "a training step, beside the same step in plain JAX",
        "step_parts": "the parts of a training step alone, in a burst and sustained",
        "step_curve": "the losses of 200 steps on real text, beside the plain-JAX step's",
        "context_parallel": "attention over a sharded sequence, beside one device's kernel",
        "flags": "XLA options on a training step, each beside a control without",
    },
    "kernels": {
        "attention": "flash attention forward and backward, beside cuDNN",
        "memory_bound": "softmaxes and norms, forward and gradient, beside XLA and a copy",
        "grouped_matmul": "rows times their group's weight, and gradients, beside PyTorch's",
        "linear_cross_entropy": "the fused loss over a large vocabulary, beside XLA's",
        "ladder": "matmul in ten steps beside cuBLAS; ELU; access, occupancy, divergence",
        "roofline": "this device's ceilings, and kernels under them",
    },
    "serving": {
        "serve": "load on a server: throughput, time to the first token and per token, goodput",
    },
    "planning": {
        "collectives": "collectives by size, as nccl-tests has it, beside JAX's own",
        "constants": "rates of matmuls, attention and memory that jaxinfra plan computes with",
        "plan_check": "the planner's step times and memory, beside the machine's",
    },
}
BENCHMARKS = {name: text for room in ROOMS.values() for name, text in room.items()}

PLANNED = ("constants", "collectives")
"""Benchmarks whose results go where the planner looks for them, unless --out names another file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra bench``."""
    known = ", ".join(BENCHMARKS)
    parser.add_argument("what", nargs="?", help=f"{known}; without one, what each measures")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")


def run(args: argparse.Namespace) -> int:
    """Runs the named benchmark's module as a program."""
    if args.what is None:
        for name, text in BENCHMARKS.items():
            print(f"{name:20s} {text}")
        return 0
    if args.what not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {args.what!r}{nearest(args.what, BENCHMARKS)}")
    (room,) = (room for room, names in ROOMS.items() if args.what in names)
    module = f"experiments.bench.{room}.{args.what}"
    if importlib.util.find_spec("experiments") is None:
        raise ConfigError(
            f"benchmark {args.what!r} is not installed: benchmarks and their baselines are in the "
            "source tree; run it from a clone's top directory"
        )
    options = list(args.options)
    if args.what in PLANNED and "--out" not in options:
        file = user_cache() / "bench" / f"{args.what}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {file}, which jaxinfra plan reads", flush=True)
        options += ["--out", str(file)]
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
