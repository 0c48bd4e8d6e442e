"""Causes made to happen in real steps of a GPU, and what their remedies win there.

    python -m experiments.bench.causes_gpu --out experiments/results/causes-gpu-h200.json

Half of Llama-3.2-1B's layers, compiled once as they should be and once for each cause. A cause and
its remedy take turns, both going on from one state, which measures what the cause costs; two steps
at the end of each one's last turn are traced, and ``jaxinfra trace`` says of two traces what
differs first (``trace A B``), or of one what it loses first (``trace RUN``). Predicted is what it
says that the remedy wins, measured how far the medians are apart. Every turn begins with a second
of steps that do not count: a GPU at its power limit takes a tenth longer than a rested one, and
what ran before decides.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxinfra
from experiments.bench.environment import clocks, environment
from experiments.bench.operating import batch_of
from jaxinfra.config import codec
from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.core.errors import JaxinfraError
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.delays import explain_step
from jaxinfra.diagnostics.difference import compare_steps
from jaxinfra.diagnostics.traced_run import TracedRun, read_traced_run
from jaxinfra.gym.causes import DIFFERENCE, TRACE, first_words
from jaxinfra.training.job import Job, keep_compiled_programs, lower_step, make_job
from jaxinfra.training.profile import Profiler, ProfileRange


@jaxinfra.part
def plain_loss(logits: jax.Array, targets: jax.Array, *, weights: jax.Array) -> jax.Array:
    """Cross entropy of [B, T, V] logits in fp32, all of them in one array."""
    del weights
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuCause:
    """Settings that cost time, and who is to say so."""

    settings: tuple[str, ...]
    command: str
    words: str  # that the first loss, or difference, must say
    without: str = "good"  # the program that the remedy makes of it


_WARM_S = 1.0  # of steps before a turn counts: one of the clock that the program itself leaves
_TURN_S = 0.5
_LOSS = "experiments.bench.causes_gpu:plain_loss"
_FLAG = "xla_gpu_exclude_nondeterministic_ops=true"
CAUSES = {
    "attention-in-xla": GpuCause(
        settings=("training.attention=xla",),
        command=DIFFERENCE,
        words="attention/core takes .* longer: it runs .* in place of a Mosaic GPU kernel",
    ),
    "unfused-loss": GpuCause(
        settings=(f"training.loss={_LOSS}",),
        command=DIFFERENCE,
        words="loss takes .* longer: it runs .* in place of .*a Mosaic GPU kernel",
    ),
    "costly-flag": GpuCause(
        settings=(f'training.xla_options=["{_FLAG}"]',),
        command=DIFFERENCE,
        words=f"XLA's options differ: {_FLAG} in the second",
    ),
    "wider-format": GpuCause(
        settings=("precision.policy=fp32", "training.attention=xla"),
        command=DIFFERENCE,
        words="it multiplies in f32 in place of bf16",
    ),
    "more-recomputation": GpuCause(
        settings=("training.remat=full",),
        command=DIFFERENCE,
        words="takes .* longer, which is recomputation",
    ),
    "idle-memory": GpuCause(
        settings=("training.remat=full",),
        command=TRACE,
        words="to recomputation: activations are computed twice",
        without="unlimited",
    ),
    "fp32-matmuls": GpuCause(
        settings=("precision.policy=fp32", "training.attention=xla"),
        command=TRACE,
        words="to matmuls in f32",
        without="attention-in-xla",
    ),
    "stacked-copies": GpuCause(
        settings=("training.unroll=1",), command=TRACE, words="to copies"
    ),
}  # fmt: skip
GOOD = {"good": (), "unlimited": ("training.remat=none",)}


def programs_of(args: argparse.Namespace) -> tuple[dict[str, Job], dict[str, str]]:
    """The jobs to compile, by name, and the name of each cause's: equal settings are one."""
    layers = args.layers
    basis = [
        f"model.stacks.0.repeats={layers}",
        f"training.batch_size={args.batch}",
        f"training.sequence_length={args.length}",
        f"training.unroll={layers}",
        *args.set,
    ]
    settings = GOOD | {name: CAUSES[name].settings for name in args.names or CAUSES}
    jobs: dict[str, Job] = {}
    names: dict[str, str] = {}
    for name, own in settings.items():
        names[name] = next((other for other in jobs if settings[other] == own), name)
        if names[name] == name:
            config = codec.override(pretraining(MODELS[args.preset]()), [*basis, *own])
            jobs[name] = make_job(config, devices=jax.devices()[:1])
    return jobs, names


def judge(cause: GpuCause, bad: Path, good: Path) -> dict[str, Any]:
    """What is said first, whether it names the cause, and what it says is won."""
    traces: list[TracedRun] = [read_traced_run(each) for each in (good, bad)]
    if cause.command == DIFFERENCE:
        first, second = traces
        found = compare_steps(first.waterfall, second.waterfall, first.step, second.step)
        said = found.paragraph()
        remedies = [
            (each.remedy, each.gain_ms) for each in found.changes if each.gain_ms is not None
        ]
    else:
        explained = explain_step(bad, traces[1])
        assert explained is not None, "a trace has a step"
        said = explained.paragraph()
        remedies = [(each.remedy, each.ms) for each in explained.delays]
    remedy, won = remedies[0] if remedies else ("", None)
    return {
        "said": first_words(said),
        "paragraph": said,
        "named": bool(re.search(cause.words, first_words(said))),
        "remedy": remedy,
        "predicted_ms": won,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.causes_gpu", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="CAUSE", help=f"of {', '.join(CAUSES)}")
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a group")
    parser.add_argument("--cache", type=Path, help="keep compiled programs there")
    parser.add_argument("--traces", type=Path, help="leave traces there")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def compiled(jobs: dict[str, Job], say: Callable[[str], None]) -> dict[str, Any]:
    """The steps that compile, all at once."""
    steps: dict[str, Any] = {}

    def one(name: str, lowered: jax.stages.Lowered) -> None:
        try:
            steps[name] = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            say(f"{name} does not compile: {str(error).splitlines()[0]}")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(one, name, lower_step(job)) for name, job in jobs.items()]
        say("traced")
    for each in waiting:
        each.result()
    say(f"compiled {', '.join(sorted(steps))}")
    return {name: steps[name] for name in jobs if name in steps}


class Turns:
    """One state that all steps advance, and what they took."""

    def __init__(self, good: Job, steps: dict[str, Any], batch: Batch, group: int):
        self.steps, self.group = steps, group
        self.state, self.batch = good.initialize(), good.put(batch)

    def take(self, name: str) -> list[float]:
        """Seconds a step, of groups of steps that do not wait for each other, as in a run; at the
        clock that the steps before leave.
        """
        self._for(name, _WARM_S)
        return self._for(name, _TURN_S)

    def _for(self, name: str, seconds: float) -> list[float]:
        took: list[float] = []
        while sum(took) < seconds:
            start = time.perf_counter()
            for _ in range(self.group):
                self.state, _ = self.steps[name](self.state, self.batch)
            jax.block_until_ready(self.state)
            took.append(time.perf_counter() - start)
        return [each / self.group for each in took]

    def trace(self, name: str, job: Job, place: Path) -> None:
        """Traces two steps."""
        profiler = Profiler(ProfileRange(start=0, stop=2), place)
        profiler.describe(job, self.state, self.batch)
        for step in range(2):
            profiler.before_step(step)
            self.state, metrics = self.steps[name](self.state, self.batch)
            profiler.after_step(step, metrics.loss)


def main() -> None:
    """Compiles; of each cause measures in turns, traces and judges; writes as it goes."""
    args, began = _arguments(), time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s: {text}", flush=True)

    place = args.traces or Path(tempfile.mkdtemp())
    keep_compiled_programs(args.cache or place / "cache")
    jobs, names = programs_of(args)
    steps = compiled(jobs, say)
    if args.compile_only:
        return
    good = jobs["good"]
    turns = Turns(
        good, steps, batch_of(good.config.model.vocab_size, args.batch, args.length), args.steps
    )
    result: dict[str, Any] = {
        "environment": environment(),
        "shapes": {
            name: getattr(args, name) for name in ("preset", "layers", "batch", "length", "set")
        },
        "rows": {},
    }
    turns.take("good")
    turns.trace("good", good, place / "thrown-away")  # the first one begins late and runs slowly
    for name in args.names or CAUSES:
        cause, own = CAUSES[name], names[name]
        without = names.get(cause.without, cause.without)
        if own not in steps or without not in steps:
            continue
        sides = {side: place / f"{name}-{side}" for side in (without, own)}
        took: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(args.rounds):
            for side, traced in sides.items():
                took[side] += turns.take(side)
                if number == args.rounds - 1:
                    turns.trace(side, jobs[side], traced)
        try:
            row = judge(cause, sides[own], sides[without])
        except JaxinfraError as error:
            say(f"{name}: {error}")
            continue
        medians = {side: 1e3 * statistics.median(each) for side, each in took.items()}
        row["command"], row["settings"] = cause.command, list(cause.settings)
        row["seconds"], row["median_ms"], row["clocks"] = took, medians, clocks()
        row["measured_ms"] = medians[own] - medians[without]
        if row["predicted_ms"] is not None:
            row["predicted_over_measured"] = row["predicted_ms"] / row["measured_ms"] - 1
        result["rows"][name] = row
        say(f"{name}: {'named' if row['named'] else 'NOT named'}: {row['said']}")
        predicted = row["predicted_ms"] or 0.0
        say(f"    predicted {predicted:.1f} ms, measured {row['measured_ms']:.1f} ms")
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
