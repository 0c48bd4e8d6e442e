"""Runs that are stopped or killed, and end as if nothing had happened: bit for bit, line by line.

The run accumulates gradients, drops out, passes from one epoch to the next, evaluates and saves.
"""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from e2e.faults import signal_at
from e2e.processes import start
from e2e.runs import STEPS, Bench, assert_same_run, checkpoints, metrics

from jaxinfra.runtime.goodput import read_sessions
from jaxinfra.runtime.injected_faults import VARIABLE
from jaxinfra.runtime.recorder import read_record, record_file
from jaxinfra.runtime.signals import RESUMABLE_EXIT

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
# What is asked to stop when, the signal, the step it must then be at.
STOPS = [
    ("jaxinfra.data.corpus:_tokenize", 1, TERM, 0),
    ("jaxinfra.data.tokenizer:Tokenizer.encode_batch", 1, INT, 0),
    ("jaxinfra.training.job:Job.initialize", 1, TERM, 0),
    ("jaxinfra.training.job:Job.put", 1, INT, 0),  # then the first step would compile
    ("jaxinfra.training.job:Job.put", 2, INT, 2),
    ("jaxinfra.checkpoint.checkpointer:Checkpointer.restore", 1, TERM, 2),
    ("jaxinfra.checkpoint.checkpointer:Checkpointer.save", 1, INT, 4),
    ("jaxinfra.training.loop:evaluate_sets", 1, TERM, 8),  # which resuming makes up for
    ("jaxinfra.checkpoint.checkpointer:Save.wait_until_copied", 1, TERM, 12),
    ("jaxinfra.training.loop:evaluate_sets", 2, INT, STEPS),
    ("jaxinfra.training.loop:summarize", 1, TERM, None),  # too late to stop anything
]
# What is killed when, and the newest complete checkpoint then.
KILLS = [
    ("os:fsync", 1, 0),  # there is a directory with half a config
    ("jaxinfra.data.tokenizer:Tokenizer.save", 1, 0),
    (
        "jaxinfra.checkpoint.directory_layout:write_manifest",
        1,
        0,
    ),  # step 4: the files are there, no sums
    ("jaxinfra.checkpoint.directory_layout:commit", 2, 4),  # step 8: all is there but the name
    ("jaxinfra.checkpoint.directory_layout:delete", 1, 12),  # of step 4, after the commit of 12
    ("jaxinfra.checkpoint.arrays:Write.finish", 1, 12),
    ("jaxinfra.training.metrics:MetricsLog.write", 3, 12),
    ("jaxinfra.training.loop:draw_run", 1, STEPS),
    ("jaxinfra.checkpoint.run_directory:RunDirectory.write_summary", 1, STEPS),
]


def moments(every: list[tuple], *like_another: int):
    """All of them in a slow test, and in a quick one those that differ in kind."""
    most = [moment for number, moment in enumerate(every) if number not in like_another]
    slow = pytest.param(every, marks=pytest.mark.slow, id="every")
    return pytest.mark.parametrize("moments", [pytest.param(most, id="most"), slow])


def test_the_run_passes_an_epoch_and_drops_out(whole):
    lines = metrics(whole)
    windows = json.loads((whole / "config.json").read_text())
    assert windows["model"]["dropout_rate"] > 0
    assert windows["training"]["accumulation"] > 1
    # 3 kB of one-byte tokens: 20 steps of 8 x 32 are more than one epoch and less than two.
    assert 3100 < sum(line["tokens"] for line in lines if "loss" in line) < 6200


@moments(STOPS, 1, 2, 3, 5, 6, 8, 9)
def test_stopped_in_turn_at_every_kind_of_moment(bench, whole, tmp_path, moments):
    # Tokenized anew: the same text in another place has another key in the cache.
    text = shutil.copytree(bench.text, tmp_path / "text")
    run = bench / "run"
    for number, (target, call, which, at_step) in enumerate(moments):
        arguments = bench.resume("run") if number else [*bench.new("run"), "--data", text]
        ended = bench.run(arguments, before=signal_at(target, which, call=call))
        assert "Traceback" not in ended.stderr, ended
        if at_step is None:
            assert ended.code == 0, (target, ended)
            break
        assert ended.code == RESUMABLE_EXIT, (target, ended)
        assert f"stopped by {which.name}" in ended.stdout, (target, ended)
        assert f"jaxinfra train --resume {run}" in ended.stdout, (target, ended)
        assert max(checkpoints(run), default=0) == at_step, (target, ended)
    assert_same_run(run, whole)


@pytest.mark.slow  # five processes; stops at other moments are above
def test_stopped_while_the_program_never_comes_and_then_the_data(bench, whole):
    """XLA runs no handler of a signal: the process ends all the same, since it has done nothing.
    A disk that hangs: what is done is saved at once, and nobody waits for its readers.
    """
    compiles = {
        "target": "jaxinfra.training.loop:same_program",
        "action": "sleep",
        "value": 3600,
        "in_c": True,
    }
    stall = {
        "target": "jaxinfra.data.packing:PackedWindows.batch",
        "samples": [6 * 8],  # of step 7
        "action": "sleep",
        "value": 3600,
    }
    run = bench / "run"
    with start(*bench.new("run"), log=bench.log(), environment=armed(compiles)) as running:
        running.wait_until(lambda _: in_phase(run, "compile", step=1))
        time.sleep(0.5)  # from the phase to the call; before it, Python would see the signal
        running.signal(TERM)
        ended = running.end()
    assert ended.code == RESUMABLE_EXIT, ended
    assert "stopped by SIGTERM" in (ended.stderr or ended.stdout), ended
    # Its reader is ahead, and hangs where the steps have not come yet.
    asks = {"target": "jaxinfra.training.watch:Watch.send", "call": 4, "action": "signal"}
    asks["value"] = int(TERM)
    with start(*bench.resume("run"), log=bench.log(), environment=armed(stall, asks)) as running:
        ended = running.end()
    assert (ended.code, ended.stderr) == (RESUMABLE_EXIT, ""), ended
    assert "stopped by SIGTERM at step 4, saved" in ended.stdout
    with start(*bench.resume("run"), log=bench.log(), environment=armed(stall)) as running:
        running.wait_until(lambda _: in_phase(run, "input", step=7))  # and stays there
        running.signal(TERM)
        ended = running.end()
    assert (ended.code, ended.stderr) == (RESUMABLE_EXIT, ""), ended
    assert "stopped by SIGTERM at step 6, saved" in ended.stdout
    resumed = bench.run(bench.resume("run"))
    assert (resumed.code, resumed.stderr) == (0, ""), resumed
    assert_same_run(run, whole)


def armed(*faults: dict[str, object]) -> dict[str, str]:
    return {VARIABLE: json.dumps(faults)}


def in_phase(run: Path, phase: str, *, step: int) -> bool:
    record = read_record(record_file(run / "recorder", 0))
    return record is not None and (record.phase, record.step) == (phase, step)


@moments(KILLS, 1, 2, 3, 5, 6, 7)
def test_killed_in_turn_at_every_kind_of_moment(bench, whole, moments):
    run = bench / "run"
    for target, call, newest in moments:
        arguments = start_or_resume(bench, "run")
        ended = bench.run(arguments, before=signal_at(target, KILL, call=call))
        assert ended.code == -KILL, (target, ended)
        assert max(checkpoints(run), default=0) == newest, (target, ended)
    resumed = bench.run(bench.resume("run"))
    assert resumed.code == 0, resumed
    assert_same_run(run, whole)
    assert checkpoints(run) == checkpoints(whole)
    # All wall time has a cause, that of killed sessions and the time between them too.
    sessions = read_sessions(run / "goodput.jsonl")
    spent = sum(
        sum(session["seconds"].values()) - session["seconds"]["lost"] for session in sessions
    )
    assert len(sessions) >= min(len(moments), 4)
    assert spent == pytest.approx(sessions[-1]["time"] - sessions[0]["began"], abs=0.5)


@pytest.mark.slow
def test_killed_at_random_moments(bench, whole):
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    for number in range(25):
        name = f"run{number}"
        for _ in range(2):
            after_lines, delay_s = rng.randrange(STEPS + 5), rng.uniform(0, 0.1)
            with start(*start_or_resume(bench, name), log=bench.log()) as running:
                running.wait_until(lambda said: said.count("\n") >= after_lines)  # noqa: B023
                time.sleep(delay_s)
                running.signal(KILL)
                code = running.end().code
            print(f"run {number}: {code} {delay_s:.3f} s after {after_lines} lines")
            assert code in (-KILL, 0)
        resumed = bench.run(start_or_resume(bench, name))
        assert resumed.code == 0, resumed
        assert_same_run(bench / name, whole)


def start_or_resume(bench: Bench, name: str) -> list[object]:
    """What a person does after a kill: killed too early, there is nothing to resume."""
    started = (bench / name / "config.json").exists()
    return bench.resume(name) if started else bench.new(name)
