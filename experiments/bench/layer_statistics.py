"""What per-layer statistics cost a step: without, and with, in one process, alternating.

    python -m experiments.bench.layer_statistics --out experiments/results/layer-statistics-cpu.json

"off" is the step of a run that asks for no statistics, "between" the ordinary step of one that
does, which is the same program, compiled apart: what differs between the two is noise. "asked" is
the step that says more. At an interval of N a run pays (asked - off) / N per step.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

import jaxinfra
from experiments.bench.environment import environment
from jaxinfra.config import codec
from jaxinfra.training.job import make_job


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.layer_statistics", description=__doc__
    )
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--steps", type=int, default=3, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    config = codec.override(jaxinfra.preset(args.preset), args.set)
    asking = make_job(codec.override(config, ["statistics.every=100"]))
    programs = {
        "off": make_job(config).train_step,
        "between": asking.train_step,
        "asked": asking.statistics_step,
    }
    training = config.training
    shape = (training.batch_size, training.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    batch = asking.put(jaxinfra.batch_of(tokens))
    state, seconds = asking.initialize(), {name: [] for name in programs}
    for program in programs.values():
        state, _ = _run(program, state, batch, steps=1)
    for number in range(args.rounds):
        order = list(programs) if number % 2 == 0 else list(reversed(programs))
        for name in order:
            state, spent = _run(programs[name], state, batch, steps=args.steps)
            seconds[name].append(spent)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    extra = medians["asked"] - medians["off"]
    shares = {every: extra / every / medians["off"] for every in (10, 100, 1000)}
    result: dict[str, Any] = {
        "command": " ".join(["python -m experiments.bench.layer_statistics", *sys.argv[1:]]),
        "environment": environment(),
        "settings": {"preset": args.preset, "set": args.set},
        "seconds": seconds,
        "median_s": medians,
        "between_over_off": medians["between"] / medians["off"],
        "asked_over_off": medians["asked"] / medians["off"],
        "share_of_step_by_interval": shares,
    }
    for name, value in medians.items():
        print(f"{name:8s} {1e3 * value:9.2f} ms ({value / medians['off'] - 1:+.2%})")
    for every, share in shares.items():
        print(f"every {every:5d} steps: {share:+.3%} of a step")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def _run(program: Any, state: Any, batch: Any, *, steps: int) -> tuple[Any, float]:
    jax.block_until_ready(state)
    began = time.process_time()
    for _ in range(steps):
        state, _ = program(state, batch)
    jax.block_until_ready(state)
    return state, (time.process_time() - began) / steps


if __name__ == "__main__":
    main()
