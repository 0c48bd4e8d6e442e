"""What a run does beside its compiled step, in turns with that step alone, in one process.

    python -m experiments.bench.training.step_overhead \\
        --out experiments/results/step-overhead-h200.json

"run" is ``jaxinfra.train`` with all that it keeps, watches and says: input, recorder, watchdog,
guards, loss spikes, allocator statistics, metrics, ledgers, and two loggers as callbacks; with
``--statistics`` also those of every layer at every eighth step. After every eighth step its first
callback waits for the device and gives a turn to "step", the run's own compiled step by itself on a
state of its own, and to "again", which is the same once more: how far these two are apart is noise.

A step's time is from the end of the step before to its own end, as the host learns of it with one
more step in the queue. The first two of a turn, in which the queue fills, do not count, nor does
the last of a program by itself: with none behind it the host knows of its end sooner.

With ``--trace`` two steps are traced at first, CUDA graphs and all, and it is counted how much of
the device's time has a scope.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

import jaxinfra
from experiments.bench.environment import clocks, environment
from jaxinfra.config import codec
from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.config.run import RunConfig
from jaxinfra.data.batch import Batch
from jaxinfra.data.token_arrays import write_token_arrays
from jaxinfra.diagnostics.delays import explain_step
from jaxinfra.diagnostics.traced_run import read_traced_run
from jaxinfra.training import session
from jaxinfra.training.job import Job, make_job
from jaxinfra.training.profile import Profiler, ProfileRange

TURN = 8
"""Steps of a turn, and between two with statistics: one in each turn of the run."""


def batch_of(vocab: int, rows: int, length: int) -> Batch:
    """Random tokens, one document per row."""
    ids = np.random.default_rng(0).integers(0, vocab, (rows, length + 1), np.int32)
    shape = (rows, length)
    return Batch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape).copy(),
        weights=np.ones(shape, np.float32),
    )


def write_random_text(directory: Path, vocab: int, *, documents: int, length: int) -> None:
    """Writes uniformly random tokens as a corpus, and a tokenizer with a word per id."""
    rng = np.random.default_rng(0)
    write_token_arrays(
        directory,
        ((rng.integers(1, vocab, length), 4 * length) for _ in range(documents)),
        vocab_size=vocab,
        bos_id=0,
        eos_id=0,
    )
    words = {"<|end_of_text|>": 0, **{f"w{number}": number for number in range(1, vocab)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.save(str(directory / "tokenizer.json"))


class _DoneError(Exception):
    """Ends the run."""


class _Turns(jaxinfra.Callback):
    """The callback that gives turns.

    Args:
        jobs: the run's, once it is made.
    """

    def __init__(self, args: argparse.Namespace, jobs: list[Job]):
        self._args, self._jobs = args, jobs
        # By then all programs are compiled.
        self._first = TURN + TURN // 2 if args.statistics else TURN // 2
        self._ends: list[float] = []
        self._tick = jax.jit(lambda x: x + 1)
        self._one = self._tick(np.float32(0))
        self._state: Any = None  # of those that run by themselves
        self._batch: Any = None
        self.rows: dict[str, list[list[float]]] = {"run": [], "step": [], "again": []}
        self.asked: list[list[float]] = []  # of each turn: the step with statistics, the next one
        self.clocks: list[str | None] = []
        self.traced: dict[str, Any] = {}

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Takes the time; after a turn's last step the others have theirs."""
        self._ends.append(time.perf_counter())
        since = record["step"] - self._first
        if since < 0 or since % TURN:
            return
        # The step after this one is in the queue; what is asked of the device comes behind it.
        jax.block_until_ready(self._tick(self._one))
        if since:
            self._take_turn()
        else:
            self._begin()
        if len(self.rows["run"]) == self._args.rounds:
            raise _DoneError
        names = ["step", "again"]
        for name in names if len(self.rows["run"]) % 2 else reversed(names):
            self.rows[name].append(self._alone(TURN))
        self.clocks.append(clocks())
        self._ends = []

    def _take_turn(self) -> None:
        taken = [after - before for before, after in itertools.pairwise(self._ends)]
        assert len(taken) == TURN - 1, "a step without a record"
        if self._args.statistics:  # at the step in the turn's middle
            asked = slice(TURN // 2 - 2, TURN // 2)
            self.asked.append(taken[asked])
            del taken[asked]
        self.rows["run"].append(taken[1:])
        write(self._args, self)

    def _begin(self) -> None:
        args, job = self._args, self._jobs[-1]
        self._state = job.initialize()
        vocab = job.config.model.vocab_size
        self._batch = job.put(batch_of(vocab, args.batch, args.length))
        self._alone(2)
        if args.trace is not None:
            self.traced = self._trace(job, args.trace)

    def _alone(self, steps: int) -> list[float]:
        """Seconds of each step but the first two and the last."""
        program, waiting, ends = self._jobs[-1].train_step, None, []
        for _ in range(steps):
            self._state, said = program(self._state, self._batch)
            if waiting is not None:
                jax.block_until_ready(waiting)
                ends.append(time.perf_counter())
            waiting = said
        jax.block_until_ready(waiting)
        return [after - before for before, after in itertools.pairwise(ends)][1:]

    def _trace(self, job: Job, directory: Path) -> dict[str, Any]:
        """What ``jaxinfra trace`` says of two steps, and how much of their time has a scope."""
        profiler = Profiler(ProfileRange(start=1, stop=3), directory)
        profiler.describe(job, self._state, self._batch)
        for step in range(3):
            profiler.before_step(step)
            self._state, metrics = job.train_step(self._state, self._batch)
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

    def result(self) -> dict[str, Any]:
        """Medians and means over all turns, and what they are beside the step's."""
        flat = {name: [s for turn in turns for s in turn] for name, turns in self.rows.items()}
        flat = {name: seconds for name, seconds in flat.items() if seconds}
        found: dict[str, Any] = {"turns_s": self.rows, "clocks": self.clocks}
        if self.traced:
            found["trace"] = self.traced
        if "run" not in flat:
            return found
        medians = {name: statistics.median(seconds) for name, seconds in flat.items()}
        means = {name: statistics.fmean(seconds) for name, seconds in flat.items()}
        found["median_s"], found["mean_s"] = medians, means
        found["median_over_step"] = {name: s / medians["step"] - 1 for name, s in medians.items()}
        found["mean_over_step"] = {name: s / means["step"] - 1 for name, s in means.items()}
        if self.asked:
            asked = statistics.median(sum(pair) for pair in self.asked) - 2 * medians["run"]
            found |= {"asked_s": self.asked, "statistics_step_costs_s": asked}
            found["statistics_share_by_interval"] = {
                every: asked / every / medians["run"] for every in (10, 100, 1000)
            }
        return found


def write(args: argparse.Namespace, turns: _Turns) -> None:
    """What is known so far."""
    shapes = {"preset": args.preset, "batch": args.batch, "length": args.length, "set": args.set}
    document = {"environment": environment(), "shapes": shapes, **turns.result()}
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


def _config(args: argparse.Namespace, source: Path) -> RunConfig:
    return codec.override(
        pretraining(MODELS[args.preset]()),
        [
            f"data.source={source}",
            f"training.batch_size={args.batch}",
            f"training.sequence_length={args.length}",
            "training.accumulation=1",
            "training.steps=1000000",
            "training.evaluate_every=1000000",
            "training.log_every=50",
            "checkpoint.every=1000000",
            "reliability.spike_factor=4",
            *([f"statistics.every={TURN}"] if args.statistics else []),
            *args.set,
        ],
    )


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.training.step_overhead", description=__doc__
    )
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--statistics", action="store_true", help="also those of layers")
    parser.add_argument("--rounds", type=int, default=5, help="0: all is compiled, none timed")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="trace two steps there")
    parser.add_argument("--cache", type=Path, help="keep compiled programs there")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    vocab = MODELS[args.preset]().vocab_size
    write_random_text(place / "tokens", vocab, documents=80 * args.batch, length=args.length)
    jobs: list[Job] = []

    def making(*given: Any, **options: Any) -> Job:
        jobs.append(make_job(*given, **options))
        return jobs[-1]

    turns = _Turns(args, jobs)
    loggers = (
        jaxinfra.JsonLinesLogger(place / "log.jsonl"),
        jaxinfra.TensorBoardLogger(place / "events"),
    )
    with unittest.mock.patch.object(session, "make_job", making), contextlib.suppress(_DoneError):
        jaxinfra.train(
            _config(args, place / "tokens"),
            place / "run",
            cache_dir=args.cache or place / "cache",
            callbacks=(turns, *loggers),
        )
    write(args, turns)
    result = turns.result()
    for name, seconds in result.get("median_s", {}).items():
        over = (result["median_over_step"][name], result["mean_over_step"][name])
        print(f"{name:6s} {1e3 * seconds:9.3f} ms ({over[0]:+.3%}; means {over[1]:+.3%})")
    if turns.asked:
        print(f"a step with statistics costs {1e3 * result['statistics_step_costs_s']:.2f} ms more")
        for every, share in result["statistics_share_by_interval"].items():
            print(f"every {every:5d} steps: {share:+.3%} of a step")


if __name__ == "__main__":
    main()
