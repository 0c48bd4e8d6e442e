"""What a run does beside its compiled step, in turns with that step alone, in one process.

    python -m experiments.bench.step_overhead --out experiments/results/step-overhead-h200.json

"run" is ``jaxinfra.train`` with all that it keeps, watches and says: input, recorder, watchdog,
guards, loss spikes, allocator statistics, metrics, ledgers, statistics at every eighth step, and
two loggers as callbacks. After every eighth step its first callback waits for the device and gives
turns to the others, which go on from a state of their own with the run's first batches: "step" is
the run's compiled step alone, "bare" the same without tests of its result, "again" that program a
second time, which is the control: what differs from "bare" there is noise.

With ``--trace`` two steps of "step" are traced at first, CUDA graphs and all, and it is counted
how much of the device's time has a scope.

A step's time is from the end of the step before to its own end, as the host learns of it with one
more step in the queue. The first two of a turn, in which the queue fills, do not count.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxinfra
from experiments.bench.environment import clocks, environment
from experiments.bench.guards import unguarded
from experiments.bench.random_text import write_random_text
from jaxinfra.config import codec
from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.config.run import RunConfig
from jaxinfra.core.errors import JaxinfraError
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.delays import explain_step
from jaxinfra.diagnostics.traced_run import read_traced_run
from jaxinfra.training.job import Job, keep_compiled_programs, make_job
from jaxinfra.training.profile import Profiler, ProfileRange

TURN = 8
"""Steps of a turn, and between two with statistics: one in each turn of the run."""

_FIRST = TURN + TURN // 2
"""The step after which turns begin: by then the step with statistics is compiled."""


class _DoneError(Exception):
    """Ends the run."""


@dataclasses.dataclass(kw_only=True)
class _Alone:
    """Programs that run by themselves, one after another, on one state."""

    programs: Mapping[str, Callable[..., Any]]
    batches: list[Batch]
    state: Any

    def turn(self, name: str, *, steps: int = TURN) -> list[float]:
        """Seconds of each step but the first, whose queue is empty."""
        program, waiting, ends = self.programs[name], None, []
        for batch in itertools.islice(itertools.cycle(self.batches), steps):
            self.state, said = program(self.state, batch)
            if waiting is not None:
                jax.block_until_ready(waiting)
                ends.append(time.perf_counter())
            waiting = said
        jax.block_until_ready(waiting)
        ends.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(ends)][1:]


class _Turns(jaxinfra.Callback):
    """The callback that gives turns."""

    def __init__(self, alone: _Alone, *, rounds: int, tell: Callable[[dict[str, Any]], None]):
        self._alone, self._rounds, self._tell = alone, rounds, tell
        self._ends: list[float] = []
        self._tick = jax.jit(lambda x: x + 1)
        self._one = self._tick(np.float32(0))
        self.rows: dict[str, list[list[float]]] = {"run": [], **{n: [] for n in alone.programs}}
        self.asked: list[list[float]] = []  # of each turn: the step with statistics, the next one
        self.clocks: list[str | None] = []

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Takes the time; after a turn's last step the others have theirs."""
        self._ends.append(time.perf_counter())
        since = record["step"] - _FIRST
        if since < 0 or since % TURN:
            return
        # The step after this one is in the queue; what is asked of the device comes behind it.
        jax.block_until_ready(self._tick(self._one))
        if since:
            taken = [after - before for before, after in itertools.pairwise(self._ends)]
            assert len(taken) == TURN - 1, "a step without a record"
            # Of the steps from the third on; statistics are those of the turn's middle.
            middle = TURN // 2 - 1
            self.asked.append(taken[middle - 1 : middle + 1])
            self.rows["run"].append(taken[1 : middle - 1] + taken[middle + 1 :])
        if len(self.rows["run"]) == self._rounds:
            raise _DoneError
        order = [*self._alone.programs]
        turned = len(self.rows["run"]) % len(order)
        for name in order[turned:] + order[:turned]:
            self.rows[name].append(self._alone.turn(name))
        self.clocks.append(clocks())
        self._tell(self.result())
        self._ends = []

    def result(self) -> dict[str, Any]:
        """Medians and means over all turns, and what they are beside the bare step's."""
        flat = {name: [s for turn in turns for s in turn] for name, turns in self.rows.items()}
        flat = {name: seconds for name, seconds in flat.items() if seconds}
        found: dict[str, Any] = {"turns_s": self.rows, "asked_s": self.asked, "clocks": self.clocks}
        if "run" not in flat:
            return found
        medians = {name: statistics.median(seconds) for name, seconds in flat.items()}
        means = {name: statistics.fmean(seconds) for name, seconds in flat.items()}
        found["median_s"], found["mean_s"] = medians, means
        found["median_over_bare"] = {name: s / medians["bare"] - 1 for name, s in medians.items()}
        found["mean_over_bare"] = {name: s / means["bare"] - 1 for name, s in means.items()}
        asked = statistics.median(sum(pair) for pair in self.asked) - 2 * medians["run"]
        found["statistics_step_costs_s"] = asked
        found["statistics_share_by_interval"] = {
            every: asked / every / medians["run"] for every in (10, 100, 1000)
        }
        return found


def _config(args: argparse.Namespace, source: Path) -> RunConfig:
    return codec.override(
        pretraining(MODELS[args.preset]()) if args.preset in MODELS else jaxinfra.preset("tiny"),
        [
            f"data.source={source}",
            f"training.batch_size={args.batch}",
            f"training.sequence_length={args.length}",
            "training.accumulation=1",
            "training.steps=1000000",
            "training.evaluate_every=1000000",
            "checkpoint.every=1000000",
            "reliability.spike_factor=4",
            f"statistics.every={TURN}",
            "training.log_every=50",
            *args.set,
        ],
    )


def _traced(job: Job, alone: _Alone, directory: Path) -> dict[str, Any]:
    """What ``jaxinfra trace`` says of two steps, and how much of their time has a scope."""
    profiler = Profiler(ProfileRange(start=1, stop=3), directory)
    profiler.describe(job, alone.state, alone.batches[0])
    for step, batch in enumerate(alone.batches[:3]):
        profiler.before_step(step)
        alone.state, metrics = alone.programs["step"](alone.state, batch)
        profiler.after_step(step, metrics.loss)
    traced = read_traced_run(directory)
    explained = explain_step(directory, traced)
    assert explained is not None, "a trace has a step"
    scopes = traced.waterfall.by_scope()
    share = 1 - scopes.get("other", 0.0) / sum(scopes.values())
    print(f"{explained.paragraph()} {share:.2%} of the device's time has a scope", flush=True)
    return {
        "said": explained.paragraph(),
        "scoped_share_of_device_time": share,
        "by_scope_ms": scopes,
        "span_ms": traced.waterfall.span_ms,
    }


def _bare(job: Job) -> Any:
    """The job's step without the guards' part."""
    return jax.jit(
        functools.partial(unguarded, job.gradient, job.optimizer),
        in_shardings=(job.shardings, job.placement.batch),
        out_shardings=(job.shardings, job.placement.replicated),
        donate_argnums=0,
        compiler_options=job.options,
    )


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.step_overhead", description=__doc__
    )
    parser.add_argument("--preset", default="llama32_1b", help="a model's, or tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, help="keep compiled programs there")
    parser.add_argument(
        "--wait-for", type=Path, metavar="FILE", help="measure once it is there: others are done"
    )
    parser.add_argument("--compile-only", action="store_true", help="fill it, and run nothing")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="trace two steps there")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    place = Path(tempfile.mkdtemp())
    cache = args.cache or place / "cache"
    keep_compiled_programs(cache)
    vocab = MODELS[args.preset]().vocab_size
    write_random_text(place / "tokens", vocab, documents=80 * args.batch, length=args.length)
    config = _config(args, place / "tokens")
    job, steps = make_job(config), jaxinfra.Steps(config)
    batches = [job.put(batch) for batch in itertools.islice(steps.batches(cache_dir=cache), 4)]
    arguments = (job.abstract_state(), batches[0])
    bare = _bare(job)
    assert job.statistics_step is not None, "statistics.every"
    lowered = {
        "bare": bare.trace(*arguments).lower(),
        "step": job.train_step.trace(*arguments).lower(),
        "statistics": job.statistics_step.trace(*arguments).lower(),
    }
    print(f"traced after {time.perf_counter() - began:.1f} s", flush=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(
            zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True)
        )
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    if args.compile_only:
        return
    programs = {"bare": compiled["bare"], "step": compiled["step"], "again": compiled["bare"]}
    alone = _Alone(programs=programs, batches=batches, state=job.initialize())
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.2)
    for name in programs:
        alone.turn(name, steps=2)
    shapes = {"preset": args.preset, "batch": args.batch, "length": args.length}
    traced: dict[str, Any] = {}
    if args.trace is not None:
        try:
            traced["trace"] = _traced(job, alone, args.trace)
        except JaxinfraError as error:  # what is timed does not need it
            print(f"no trace: {error}", flush=True)
    print(f"begins after {time.perf_counter() - began:.1f} s", flush=True)

    def tell(result: dict[str, Any]) -> None:
        head = {"environment": environment(), "shapes": shapes, "set": args.set}
        if args.out is not None:
            args.out.write_text(json.dumps({**head, **result, **traced}, indent=1) + "\n")

    turns = _Turns(alone, rounds=args.rounds, tell=tell)
    loggers = (
        jaxinfra.JsonLinesLogger(place / "log.jsonl"),
        jaxinfra.TensorBoardLogger(place / "events"),
    )
    with contextlib.suppress(_DoneError):
        jaxinfra.train(config, place / "run", cache_dir=cache, callbacks=(turns, *loggers))
    result = turns.result()
    tell(result)
    for name, seconds in result["median_s"].items():
        over = (result["median_over_bare"][name], result["mean_over_bare"][name])
        print(f"{name:6s} {1e3 * seconds:9.3f} ms ({over[0]:+.3%}; means {over[1]:+.3%})")
    shares = result["statistics_share_by_interval"]
    print(f"a step with statistics costs {1e3 * result['statistics_step_costs_s']:.2f} ms more")
    for every, share in shares.items():
        print(f"every {every:5d} steps: {share:+.3%} of a step")


if __name__ == "__main__":
    main()
