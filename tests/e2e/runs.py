"""One small run, and how to compare two runs."""

import functools
import hashlib
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from e2e.faults import signal_at
from e2e.processes import Ended, run

from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.run import RunConfig
from jaxinfra.training.job import make_job

STEPS = 20
_WORDS = ("the", "model", "layer", "of", "token", "reads", "writes", "loss", "step", "data", "mesh")
# Differ between two runs of the same steps.
_TIMES = (
    *("step_s", "tokens_per_s", "mfu", "stall_s", "elapsed_s", "peak_bytes"),
    *("rl/rollout_s", "rl/reward_s", "rl/score_s", "rl/waited_s", "rl/rollout_tokens_per_s"),
)

# 8 sequences of 32 tokens a step are an epoch in about 13 steps of the text below.
_SETTINGS = {
    "training.steps": STEPS,
    "training.batch_size": 8,
    "training.sequence_length": 32,
    "training.accumulation": 2,
    "training.evaluate_every": 8,
    "training.log_every": 1,
    "checkpoint.every": 4,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 4e-3,
    "optimizer.muon": "none",
    "data.heldout_fraction": 0.2,
    "data.tokenizer.kind": "bytes",
    "model.vocab_size": 300,
    "model.model_dim": 32,
    "model.stacks.0.repeats": 2,
    "model.dropout_rate": 0.1,
    "model.stacks.0.pattern.0.mixer.head_dim": 8,
    "model.stacks.0.pattern.0.feed_forward.hidden_dim": 64,
}


def make_text(directory: Path, *, num_documents: int = 12, seed: int = 0) -> Path:
    """A directory of text files."""
    directory.mkdir(parents=True)
    rng = random.Random(seed)
    for number in range(num_documents):
        words = (rng.choice(_WORDS) for _ in range(70))
        (directory / f"{number:03d}.txt").write_text(" ".join(words) + "\n")
    return directory


class Bench:
    """A place for runs that share text, settings and the programs compiled for them."""

    def __init__(self, place: Path, *, cache: Path, text: Path):
        self.place = place
        self.cache = cache
        self.text = text
        self._num_logs = 0

    def log(self) -> Path:
        self._num_logs += 1
        return self.place / f"log{self._num_logs}"

    def new(self, name: str, **settings: object) -> list[object]:
        """Arguments that train a new run; a setting's dots are written ``__``."""
        changed = {path.replace("__", "."): value for path, value in settings.items()}
        options = [f"--set={path}={value}" for path, value in (_SETTINGS | changed).items()]
        where = ["--run", self.place / name, "--data", self.text, "--cache", self.cache]
        return ["train", "tiny", "--no-sample", *where, *options]

    def resume(self, name: str, *options: object) -> list[object]:
        where = ["--resume", self.place / name, "--cache", self.cache]
        return ["train", "--no-sample", *where, *options]

    def run(self, arguments: list[object], **options) -> Ended:
        return run(*arguments, log=self.log(), **options)

    def __truediv__(self, name: str) -> Path:
        return self.place / name


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_times(directory: Path) -> list[dict[str, Any]]:
    """The records, but for what the clock put there."""
    return [
        {name: value for name, value in record.items() if name not in _TIMES}
        for record in metrics(directory)
    ]


def checkpoints(directory: Path) -> list[int]:
    """Committed steps."""
    return sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step_????????"))


def state_sums(directory: Path, step: int) -> dict[str, str]:
    """SHA-256 of every array of a checkpoint, and its data state."""
    run = RunDirectory(directory)
    assert verify(run.checkpoints, step) == []
    restored = load_state(run.checkpoints, _abstract_state(run.read_config()), step=step)
    leaves = jax.tree_util.tree_leaves_with_path(restored.state)
    sums = {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in leaves
    }
    # Batches that a run skipped, or was told to leave out, are those it did not learn from.
    position = {name: value for name, value in restored.data_state.items() if name != "excluded"}
    return sums | {"data": json.dumps(position, sort_keys=True)}


def killed_and_resumed(bench: Bench, new: Callable[[str], list[object]], steps: int) -> Path:
    """A run that was killed as its second checkpoint would be complete, and resumed: at its end
    its state and records are to the bit those of a run that nobody killed.

    Args:
        new: arguments that train a run of a name, which saves every second one of its steps.
    """
    ended = bench.run(new("whole"))
    assert (ended.code, ended.stderr) == (0, ""), ended
    killed = bench.run(new("killed"), before=killed_at_the_second_save)
    assert killed.code == -signal.SIGKILL, killed
    assert checkpoints(bench / "killed") == [2]
    resumed = bench.run(bench.resume("killed"))
    assert resumed.code == 0, resumed
    assert state_sums(bench / "killed", steps) == state_sums(bench / "whole", steps)
    assert without_times(bench / "killed") == without_times(bench / "whole")
    return bench / "killed"


def killed_at_the_second_save() -> None:
    signal_at("jaxinfra.checkpoint.directory_layout:commit", signal.SIGKILL, call=2)()


@functools.cache
def _abstract_state(config: RunConfig) -> Any:
    """Of the runs of one config, traced once."""
    return make_job(config).abstract_state()


def assert_same_run(got: Path, want: Path) -> None:
    """Parameters, optimizer, counters, RNG, data position and every recorded value are equal."""
    assert state_sums(got, STEPS) == state_sums(want, STEPS)
    assert without_times(got) == without_times(want)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (got, want)]
    exact = ("final_loss", "heldout_loss", "heldout_bits_per_byte", "steps", "skipped")
    assert [summaries[0].get(name) for name in exact] == [summaries[1].get(name) for name in exact]
