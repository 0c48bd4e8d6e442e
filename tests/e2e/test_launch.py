"""Several processes through the real commands: the same run as one process, and what kills one.

The jobs are those of ``jaxinfra faults``: processes with one CPU device each, on the loopback.
"""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from e2e import processes

from jaxinfra.cli.main import main
from jaxinfra.faults import damage, deaths, serving, wrong_or_slow
from jaxinfra.faults.arena import Arena, metrics, state_sums, values
from jaxinfra.faults.verdict import FAULTS, judge
from jaxinfra.runtime.cluster import free_port
from jaxinfra.runtime.recorder import read_records

MODULES = (damage, deaths, serving, wrong_or_slow)  # they enter their faults when imported
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
# Take no second start of a job.
FAST = (1,)


@pytest.fixture(scope="module")
def arena(tmp_path_factory) -> Arena:
    return Arena(tmp_path_factory.mktemp("faults"), options=[], processes=2)


@pytest.fixture(scope="module")
def two(arena) -> Path:
    """The run of two processes that one launcher or another would start."""
    run = arena.directory / "two"
    job = {"JAXINFRA_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXINFRA_NUM_PROCESSES": "2"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                processes.start(
                    *(*arena.settings(), "--run", run),
                    log=arena.directory / f"two{rank}",
                    environment=job | {"JAXINFRA_PROCESS_ID": str(rank)},
                )
            )
            for rank in range(2)
        ]
        ended = [rank.end() for rank in ranks]
    assert [each.code for each in ended] == [0, 0], ended
    return run


def test_two_processes_are_one_with_two_devices_to_the_last_bit(arena, two):
    """A sum of two numbers has one rounding, whoever adds them: nothing may differ."""
    words = [*arena.settings(), "--run", str(arena.directory / "alone")]
    ended = processes.run(*words, log=arena.directory / "alone", environment=TWO_DEVICES)
    assert ended.code == 0, ended
    alone = arena.directory / "alone"
    assert values(two) == values(alone)
    assert state_sums(two, 12) == state_sums(alone, 12)


@pytest.mark.slow
def test_four_processes_are_one_device(tmp_path):
    """A sum of four has an order. Four processes differ from one device no more than twice what
    four devices of one process do, and the last bit of a loss.
    """
    arena = Arena(tmp_path, options=[], processes=4)
    losses = {
        "processes": [record["loss"] for record in values(arena.reference()) if "loss" in record]
    }
    for name, devices in (("devices", 4), ("device", 1)):
        words = [*arena.settings(processes=devices), "--run", str(arena.directory / name)]
        flag = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        with arena.start(words, run=name, environment=flag) as job:
            ended = job.end()
        assert ended.code == 0, ended.said
        records = values(arena.directory / name)
        losses[name] = [record["loss"] for record in records if "loss" in record]
    four, devices, one = (np.array(losses[name]) for name in ("processes", "devices", "device"))
    assert len(one) == 12
    last_bit = np.spacing(np.max(one).astype(np.float32))
    assert np.max(np.abs(four - one)) <= 2 * np.max(np.abs(devices - one)) + last_bit


def test_the_first_process_alone_writes_the_run(two):
    names = {path.name for path in two.iterdir()}
    assert {"summary.json", "metrics.jsonl", "loss.png", "goodput.jsonl", "metrics.prom"} <= names
    assert {path.name for path in (two / "recorder").glob("*.ring")} == {
        "rank-00000.ring",
        "rank-00001.ring",
    }
    steps = [record["step"] for record in metrics(two) if "loss" in record]
    assert steps == list(range(1, 13))
    summary = json.loads((two / "summary.json").read_text())
    causes = summary["wall_s_by_cause"]
    # Wall time from the start of the process's work to the summary, all of it accounted for.
    assert sum(causes.values()) == pytest.approx(summary["wall_s"], abs=0.5)
    assert 0 < summary["goodput"] < 1


def test_every_rank_records_its_program_phases_and_queue(two, capsys):
    records = read_records(two / "recorder")
    names = [[event.name for event in record.events] for record in records]
    (program,) = {name for name in names[0] if name.startswith("program ")}
    assert all(seen.count(program) == 1 for seen in names), "the fingerprint, the same on all"
    phases = {"input", "batches ready", "place", "compile", "step", "wait", "evaluate", "save"}
    assert all(phases <= {*seen} for seen in names)
    assert main(["doctor", "recorder", str(two), "--last", "3"]) == 0
    said = capsys.readouterr().out
    assert "rank 1 on " in said
    assert len(said.splitlines()) == len(records) * (1 + 3)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize(
    "number",
    [
        number if number in FAST else pytest.param(number, marks=pytest.mark.slow)
        for number in sorted(FAULTS)
    ],
)
@pytest.mark.timeout(3000)
def test_fault(arena, number):
    verdict = judge(number, arena)
    print(verdict.evidence)
    assert verdict.passed, verdict.evidence


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ranks_killed_at_random_moments(arena):
    """The supervisor starts the job again after each; the end is the undisturbed run's."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    kills = 0
    for number in range(10):
        # Every restart at once: otherwise the pauses double.
        options = {"restarts": 20, "options": ["--backoff", "0"]}
        with arena.launch(f"kills-{number}", arena.settings(), **options) as job:
            gone: set[int] = set()
            while kills < 10 and job.process.poll() is None:
                here = {record.rank: record.pid for record in read_records(job.run / "recorder")}
                if len(here) < arena.processes or gone & {*here.values()}:
                    time.sleep(0.02)
                    continue
                time.sleep(rng.uniform(0, 5))
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(here[rng.randrange(arena.processes)], signal.SIGKILL)
                    kills += 1
                gone |= {*here.values()}
            ended = job.end()
        assert ended.code == 0, ended.said
        print(arena.require_same(f"kills-{number}"))
        if kills == 10:
            return
    pytest.fail(f"only {kills} kills hit a running rank")
