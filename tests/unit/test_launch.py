"""Who is who in a job, how its processes meet, and who is blamed when one ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxinfra.cli.launch import requeue, train_commands
from jaxinfra.cli.main import main
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.cluster import Cluster, detect_cluster, expand_nodes
from jaxinfra.runtime.recorder import read_incidents
from jaxinfra.runtime.supervisor import (
    Ending,
    Limits,
    NodeRanks,
    Supervisor,
    count_memory_kills,
    first_failure,
)

SLURM = {
    "SLURM_JOB_ID": "40123",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_NODELIST": "gpu[01-03],old7",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "head",
}
JOB_SET = {
    "JOBSET_NAME": "pretrain",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "3",
    "NUM_PROCESSES": "8",
    "PODS_PER_JOB": "4",
}
PLAIN = {
    "JAXINFRA_COORDINATOR": "10.0.0.1:1234",
    "JAXINFRA_NUM_PROCESSES": "4",
    "JAXINFRA_PROCESS_ID": "3",
}


def place(cluster: Cluster) -> tuple:
    return cluster.coordinator, cluster.num_processes, cluster.process_id, cluster.local_id


def test_environments_say_who_is_who():
    assert place(detect_cluster(PLAIN)) == ("10.0.0.1:1234", 4, 3, 0)
    assert place(detect_cluster(SLURM)) == ("gpu01:20123", 20, 17, 1)
    assert detect_cluster(SLURM).num_local == 4
    assert place(detect_cluster(OPEN_MPI)) == ("head:20000", 8, 5, 1)
    assert place(detect_cluster(JOB_SET)) == ("pretrain-workers-0-0.pretrain:20000", 8, 7, 0)
    # What a person sets goes before what a scheduler does.
    assert detect_cluster(SLURM | PLAIN).source == "plain"


def test_alone_there_is_no_cluster():
    batch_script = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID")}
    one_task = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    for environment in ({}, batch_script, one_task):
        assert detect_cluster(environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"JAXINFRA_PROCESS_ID": "0"}, ["JAXINFRA_COORDINATOR", "JAXINFRA_NUM_PROCESSES"]),
        (PLAIN | {"JAXINFRA_COORDINATOR": "10.0.0.1"}, ["10.0.0.1", "host:port"]),
        (PLAIN | {"JAXINFRA_PROCESS_ID": "4"}, ["process 4 of 4"]),
        (PLAIN | {"JAXINFRA_NUM_PROCESSES": "four"}, ["'four'", "whole number"]),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST", "srun"]),
        ({k: v for k, v in OPEN_MPI.items() if k != "MASTER_ADDR"}, ["MASTER_ADDR"]),
        ({"JOBSET_NAME": "pretrain"}, ["JOB_INDEX", "NUM_PROCESSES", "jobset.yaml"]),
    ],
)
def test_half_an_environment_is_refused(environment, words):
    with pytest.raises(ConfigError) as error:
        detect_cluster(environment)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a", ["a"]),
        ("a,b-2", ["a", "b-2"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1,3-4]x,m", ["n1x", "n3x", "n4x", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
    ],
)
def test_node_lists(text, nodes):
    assert expand_nodes(text) == nodes


def test_blame_goes_to_the_one_that_was_there_first():
    killed = Ending(rank=2, code=-signal.SIGKILL, order=1)
    aborted = Ending(rank=0, code=-signal.SIGABRT, order=0)
    lost = Ending(rank=1, code=74, order=2)
    ended = Ending(rank=3, code=-signal.SIGKILL, order=3, killed_by_us=True)
    assert first_failure([aborted, killed, lost, ended]) is killed
    assert first_failure([aborted, lost]) is aborted
    halted = Ending(rank=3, code=-signal.SIGKILL, order=3, killed_by_us=True, stopped=True)
    assert first_failure([aborted, lost, halted]) is halted
    assert first_failure([Ending(rank=0, code=0, order=0)]) is None
    assert (killed.exit_code, aborted.exit_code, lost.exit_code) == (137, 134, 74)


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_kills_for_memory_are_counted(tmp_path, name):
    assert count_memory_kills(tmp_path) is None
    (tmp_path / name).write_text("low 0\noom 4\noom_kill 3\n")
    assert count_memory_kills(tmp_path) == 3


def supervise(tmp_path, program: str, *, processes: int = 2, again: str | None = None, **limits):
    command = [sys.executable, "-c", "import os, sys, signal, time\n" + program]
    later = command if again is None else [*command[:2], "import os, sys, signal, time\n" + again]
    code = Supervisor(
        command,
        again=later,
        num_processes=processes,
        logs=tmp_path / "logs",
        recorder=None,
        incidents=tmp_path / "run" / "incidents.jsonl",
        limits=Limits(backoff_s=0.01, **limits),
        place=NodeRanks(),
        environment={},
    ).run()
    return code, json.loads((tmp_path / "logs" / "report.json").read_text())


RANK = "rank = int(os.environ['JAXINFRA_PROCESS_ID'])\n"


def test_a_job_that_ends_normally(tmp_path, capfd):
    code, report = supervise(tmp_path, RANK + "print('rank', rank); print('oh', file=sys.stderr)")
    assert (code, len(report)) == (0, 1)
    out, err = capfd.readouterr()
    assert out == "rank 0\n"
    assert sorted(err.splitlines()) == ["[rank 0] oh", "[rank 1] oh"]
    assert (tmp_path / "logs" / "attempt-0.rank-1.out").read_text() == "rank 1\n"


def test_a_killed_rank_is_named_and_the_job_started_again(tmp_path, capfd):
    program = RANK + "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"
    (tmp_path / "run").mkdir()
    code, report = supervise(tmp_path, program, again="pass")
    assert code == 0
    (incident,) = read_incidents(tmp_path / "run" / "incidents.jsonl")
    assert (incident["kind"], incident["rank"], incident["exit"]) == ("rank ended", 1, 137)
    assert "SIGKILL" in incident["text"]
    assert "restart 1 of 3" in incident["text"]
    assert [(one["exit"], one["first"]) for one in report] == [(137, 1), (0, None)]
    assert "rank 1 was ended by SIGKILL (exit 137) first" in capfd.readouterr().err


def test_restarts_are_bounded_and_the_exit_code_is_the_first_failure(tmp_path):
    program = RANK + "time.sleep(0.5 * rank); sys.exit(74 if rank else -11 % 256)"
    code, report = supervise(tmp_path, program, max_restarts=2)
    assert (code, len(report)) == (245, 3)


def test_what_would_fail_again_is_not_started_again(tmp_path, capfd):
    program = (
        RANK + "print('a bad setting', file=sys.stderr) if rank else time.sleep(9)\nsys.exit(1)"
    )
    code, report = supervise(tmp_path, program)
    assert (code, len(report), report[0]["first"]) == (1, 1, 1)
    assert "it said: a bad setting" in report[0]["text"]
    assert "would not help" in capfd.readouterr().err


STOPS = "signal.signal(15, lambda *_: sys.exit(75)); print('ready', flush=True); time.sleep(60)"
IGNORES = (
    "signal.signal(15, lambda *_: None); print('ready', flush=True)\nwhile True: time.sleep(1)"
)


@pytest.mark.parametrize(("program", "code"), [(STOPS, 75), (IGNORES, 137)])
def test_a_signal_is_passed_on_and_the_grace_is_kept(tmp_path, program, code):
    ready = [tmp_path / "logs" / f"attempt-0.rank-{rank}.out" for rank in range(2)]

    def stop() -> None:
        while not all(path.exists() and path.read_text() for path in ready):
            time.sleep(0.02)
        signal.raise_signal(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    got, report = supervise(tmp_path, program, grace_s=1.0)
    thread.join()
    assert (got, len(report)) == (code, 1)


def test_one_rank_that_stops_early_stops_the_others(tmp_path):
    program = RANK + "sys.exit(75) if rank else None\n" + STOPS
    code, report = supervise(tmp_path, program, max_restarts=0, grace_s=20.0)
    assert (code, len(report)) == (75, 1)


# Exit code, whether a signal had asked the job to stop, whether it goes back into the queue.
REQUEUED = [(75, True, True), (137, True, True), (0, True, False), (1, True, False)]
REQUEUED += [(137, False, False)]


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Slurm's, which writes what it was asked for; it refuses job 666."""
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ $2 != 666 ] || {{ echo No >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    return tmp_path / "asked"


def test_a_stopped_slurm_job_is_requeued_once(scontrol, monkeypatch, capsys):
    for node in ("1", "0"):
        monkeypatch.setenv("SLURM_NODEID", node)
        requeue(os.environ)
    assert scontrol.read_text() == "requeue 123\n"
    monkeypatch.setenv("SLURM_JOB_ID", "666")
    requeue(os.environ)
    assert "not requeued: scontrol requeue 666: No" in capsys.readouterr().err


def test_requeue_is_refused_before_the_job_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = ["launch", "-n", "1", "--requeue", "--logs", str(tmp_path / "logs"), "--", "evaluate"]
    assert main(words) == 1
    assert "under Slurm only" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("code", "asked", "is_requeued"), REQUEUED)
def test_what_can_be_continued_is_requeued(scontrol, monkeypatch, code, asked, is_requeued):
    monkeypatch.setattr(Supervisor, "run", lambda self: code)
    monkeypatch.setattr(Supervisor, "was_asked", asked)
    assert main(["launch", "-n", "1", "--requeue", "--", "evaluate"]) == code
    assert scontrol.exists() == is_requeued


def test_a_training_command_continues_when_it_is_started_again():
    first, again, run = train_commands(["train", "tiny", "--run", "runs/a", "--steps", "9"])
    assert first == ["train", "tiny", "--run", "runs/a", "--steps", "9"]
    assert again == [*first, "--continue"]
    assert str(run) == "runs/a"
    resumed = ["train", "--resume=runs/b"]
    assert train_commands(resumed) == (resumed, resumed, Path("runs/b"))


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-launch.sbatch", "openmpi.sh"])
def test_job_files_are_shell(name):
    script = Path(__file__).parents[2] / "experiments" / "launch" / name
    subprocess.run(["bash", "-n", script], check=True)
