"""Damaged checkpoints, full disks and resumptions under another config."""

import fcntl
import hashlib
import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from e2e.faults import file_size_limit, signal_at
from e2e.runs import (
    STEPS,
    Bench,
    assert_same_run,
    checkpoints,
    make_text,
    metrics,
    state_sums,
    without_times,
)

from jaxinfra.data.tokenizer import train_bpe
from jaxinfra.runtime.signals import RESUMABLE_EXIT


@pytest.fixture(scope="module")
def stopped_at_12(shared) -> Path:
    """A run that was stopped as it saved step 12."""
    fault = signal_at("jaxinfra.checkpoint.checkpointer:Checkpointer.save", signal.SIGTERM, call=3)
    ended = shared.run(shared.new("stopped"), before=fault)
    assert ended.code == RESUMABLE_EXIT, ended
    assert checkpoints(shared / "stopped") == [8, 12]
    return shared / "stopped"


@pytest.fixture
def run(stopped_at_12, bench) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(stopped_at_12, bench / "run")


def flip_a_bit(directory: Path, rng: random.Random) -> str:
    """Flips one bit of one file; returns the file's name in the checkpoint."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return file.relative_to(directory).as_posix()


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but the lock, which names the process that held it last."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_without_a_good_checkpoint_nothing_is_trained(bench, run):
    rng = random.Random(0)
    for step in checkpoints(run):
        flip_a_bit(run / "checkpoints" / f"step_{step:08d}", rng)
    before = (run / "metrics.jsonl").read_bytes()
    first = bench.run(bench.resume("run"))
    assert first.code == 1
    *_, error = first.lines()
    assert "no good checkpoint" in error
    assert "step 8" in error
    assert "step 12" in error
    # All are in quarantine now: that must not be taken for a run that never made one.
    second = bench.run(bench.resume("run"))
    (error,) = second.lines()
    assert second.code == 1
    assert "set aside as damaged" in error
    assert (run / "metrics.jsonl").read_bytes() == before
    assert len(list((run / "checkpoints" / "quarantine").glob("step_*.json"))) == 2


def other_tokenizer(run: Path, bench: Bench) -> list[object]:
    texts = [path.read_text() for path in sorted(bench.text.iterdir())]
    train_bpe(texts, vocab_size=280).save(run / "tokenizer.json")
    return []


def larger_tokenizer(run: Path, bench: Bench) -> list[object]:
    texts = [path.read_text() for path in sorted(bench.text.iterdir())]
    train_bpe(texts, vocab_size=320).save(run / "tokenizer.json")
    return []


def other_text(run: Path, bench: Bench) -> list[object]:
    return ["--data", make_text(run.parent / "other", seed=1)]


REFUSALS = {
    "vocabulary": (["--set=model.vocab_size=512"], ["vocab_size", "300", "512"]),
    "shape": (["--set=model.stacks.0.repeats=4"], ["repeats", "2", "4"]),
    "tokenizer": (other_tokenizer, ["tokenizer: saved", "use the saved values"]),
    "larger tokenizer": (larger_tokenizer, ["tokenizer: saved", "use the saved values"]),
    "text": (other_text, ["data=", "same data"]),
    "seed": (["--seed", "7"], ["seed=0", "7"]),
    "batch": (["--batch-size", "16"], ["batch_size=8", "16"]),
    "sequence": (["--sequence-length", "16"], ["sequence_length=32", "16"]),
    "too few steps": (["--steps", "10"], ["step 12", "training.steps=10"]),
    "past profile": (["--profile", "3:5"], ["3:5", "12:20"]),
    "preset": (["tiny"], ["--resume", "no preset"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_resumption_that_would_be_another_run_is_refused(bench, run, case):
    change, words = REFUSALS[case]
    options = change(run, bench) if callable(change) else change
    before = contents(run)
    ended = bench.run(bench.resume("run", *options))
    assert ended.code == 1
    (line,) = ended.lines()
    assert [word for word in words if word not in line] == [], line
    assert contents(run) == before


def test_a_run_that_two_would_write_to_is_refused(bench, run):
    with (run / "checkpoints" / ".lock").open("a+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        before = contents(run)
        ended = bench.run(bench.resume("run"))
    (line,) = ended.lines()
    assert (ended.code, contents(run)) == (1, before)
    assert "in use by another writer" in line


@pytest.mark.slow
def test_on_two_devices_the_same_data_follow(bench, run, whole):
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ended = bench.run(bench.resume("run", "--mesh", "fsdp=2"), environment=two)
    assert (ended.code, ended.stderr) == (0, ""), ended
    assert "fsdp=2" in ended.stdout
    assert json.loads((run / "config.json").read_text())["mesh"]["fsdp"] == 2
    assert json.loads((run / "config.before-1.json").read_text())["mesh"]["fsdp"] == 1
    # `tokens` counts the batch's targets that are not padding: the same batches, in order.
    exact = [(r["step"], r.get("tokens"), r.get("learning_rate")) for r in metrics(run)]
    assert exact == [(r["step"], r.get("tokens"), r.get("learning_rate")) for r in metrics(whole)]
    for got, want in zip(without_times(run), without_times(whole), strict=True):
        for name in {"loss", "heldout_loss"} & want.keys():
            # fp32 sums in another order: a few ulp a step, which eight steps hardly spread.
            assert got[name] == pytest.approx(want[name], rel=1e-5)


@pytest.mark.slow
def test_a_full_disk_loses_no_checkpoint_and_nothing_else(bench, run, whole):
    kept = {step: state_sums(run, step) for step in checkpoints(run)}
    # Enough for metrics and the picture, too little for the arrays.
    ended = bench.run(bench.resume("run"), before=file_size_limit(100_000))
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    *_, error = ended.lines()
    assert "step 20 was not saved" in error
    assert "File too large" in error
    assert "step 16 was not saved" in ended.stdout, "training went on after it"
    assert steps_of(metrics(run)) == list(range(1, STEPS + 1))
    assert not (run / "summary.json").exists(), "a run whose end is not saved is not complete"
    assert {step: state_sums(run, step) for step in checkpoints(run)} == kept
    # With room again it ends as if there had been room.
    assert bench.run(bench.resume("run")).code == 0
    assert_same_run(run, whole)


def steps_of(records) -> list[int]:
    return [record["step"] for record in records if "loss" in record]
