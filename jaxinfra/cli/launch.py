"""Start several processes of one job on this node, and start them again when one fails.

jaxinfra launch -n 4 -- train small --mesh fsdp=4 --run runs/small-1
jaxinfra launch -n 8 --restarts 10 -- train --resume runs/small-1

What follows -- is a jaxinfra command. A run that is started again continues from its newest good
checkpoint. On a cluster, start one process per GPU with srun or mpirun instead
(docs/multi-host.md), or one launch per node, which finds the other nodes as a single process would.

The exit code is that of the rank that failed first, 128 + n where signal n ended it; 0 where all
ended normally; 75 where the run was asked to stop and can be continued.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxinfra.config.limits import limits_are_on, require_within
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.cluster import detect_cluster
from jaxinfra.runtime.files import new_run_directory
from jaxinfra.runtime.signals import RESUMABLE_EXIT
from jaxinfra.runtime.supervisor import Limits, NodeRanks, Supervisor

_PROCESS_BYTES = 250_000_000  # of one that has loaded JAX


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra launch``."""
    defaults = Limits()
    parser.add_argument("-n", "--processes", type=int, required=True, help="processes on this node")
    parser.add_argument(
        "--restarts",
        type=int,
        default=defaults.max_restarts,
        metavar="N",
        help=f"most restarts without progress (default: {defaults.max_restarts})",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=defaults.backoff_s,
        metavar="SECONDS",
        help=f"wait before the first restart (default: {defaults.backoff_s:g})",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=defaults.grace_s,
        metavar="SECONDS",
        help=f"time to stop before processes are killed (default: {defaults.grace_s:g})",
    )
    parser.add_argument("--port", type=int, help="port of process 0 (default: a free one)")
    parser.add_argument("--logs", type=Path, help="processes' output (default: in the run)")
    parser.add_argument(
        "--requeue", action="store_true", help="under Slurm: requeue the job when asked to stop"
    )
    parser.add_argument(
        "--memory-group",
        type=Path,
        help="cgroup whose out-of-memory kills are counted (default: its own)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- train ...")


def run(args: argparse.Namespace) -> int:
    """Starts the job's processes, restarts them on failure, and returns the exit code."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("what to launch? Put it after --, as in launch -n 4 -- train tiny")
    if args.processes < 1 or args.restarts < 0:
        raise ConfigError(
            f"-n {args.processes} must be at least 1 and --restarts {args.restarts} not negative"
        )
    require_within(processes=args.processes)
    _require_memory(args.processes)
    run_directory = None
    again = command
    if command[0] == "train":
        command, again, run_directory = train_commands(command)
    if args.requeue:
        require_slurm(os.environ)
    program = [sys.executable, "-m", "jaxinfra"]
    logs = args.logs or (
        Path("launch-logs")
        if run_directory is None
        else run_directory.with_name(run_directory.name + ".launch")
    )
    supervisor = Supervisor(
        program + command,
        again=program + again,
        num_processes=args.processes,
        logs=logs,
        recorder=None if run_directory is None else run_directory / "recorder",
        incidents=None if run_directory is None else run_directory / "incidents.jsonl",
        limits=Limits(max_restarts=args.restarts, backoff_s=args.backoff, grace_s=args.grace),
        place=_place(args),
        environment=_without_cluster(),
        memory_group=args.memory_group,
    )
    code = supervisor.run()
    # Killed because the grace was too short it can be continued too, from an older checkpoint.
    if args.requeue and (code == RESUMABLE_EXIT or (supervisor.was_asked and code > 2)):
        requeue(os.environ)
    return code


def _require_memory(processes: int) -> None:
    """Raises ConfigError if the processes would not fit into memory without swapping."""
    held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if processes * _PROCESS_BYTES > held and limits_are_on():
        raise ConfigError(
            f"-n {processes}: each process takes {_PROCESS_BYTES / 1e9:g} GB at least, and this "
            f"machine has {held / 1e9:.0f} GB; start fewer of them"
        )


def train_commands(command: list[str]) -> tuple[list[str], list[str], Path]:
    """Returns the first command of a job, the command that resumes it, and the run directory."""
    resumed, given = _option(command, "--resume"), _option(command, "--run")
    if resumed is not None:
        return command, command, Path(resumed)
    if given is None:
        preset = next((word for word in command[1:2] if not word.startswith("-")), "tiny")
        given = str(new_run_directory(preset))
        command = [*command, "--run", given]
    again = command if "--continue" in command else [*command, "--continue"]
    return command, again, Path(given)


def _option(command: list[str], name: str) -> str | None:
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == name:
            return following
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def _place(args: argparse.Namespace) -> NodeRanks:
    """Among other nodes' launchers, where a cluster started one on each."""
    nodes = detect_cluster(os.environ)
    if nodes is None:
        return NodeRanks(port=args.port)
    if args.restarts:
        raise ConfigError(
            f"{nodes.num_processes} launchers ({nodes.source}) cannot restart their job apart from "
            "each other; give --restarts 0 and let the cluster start all of them again "
            "(docs/multi-host.md)"
        )
    return NodeRanks(
        host=nodes.host,
        port=args.port or nodes.port,
        first_rank=nodes.process_id * args.processes,
        num_ranks=nodes.num_processes * args.processes,
    )


def _without_cluster() -> dict[str, str]:
    """The environment without what would tell a process another place than ours."""
    ours = ("JAXINFRA_COORDINATOR", "JAXINFRA_NUM_PROCESSES", "JAXINFRA_PROCESS_ID")
    return {name: value for name, value in os.environ.items() if name not in ours}


def require_slurm(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if ``requeue`` could not work, before the job starts."""
    if environment.get("SLURM_JOB_ID") is None or shutil.which("scontrol") is None:
        raise ConfigError("--requeue works under Slurm only: no SLURM_JOB_ID, or no scontrol")


def requeue(environment: Mapping[str, str]) -> None:
    """Requeues this Slurm job; only the first of several nodes does so.

    If Slurm refuses, prints a message; the job's exit code is unchanged.
    """
    if environment.get("SLURM_NODEID", "0") != "0":
        return
    words = ["scontrol", "requeue", environment["SLURM_JOB_ID"]]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = " ".join(ended.stderr.split())
        print(f"jaxinfra launch: not requeued: {' '.join(words)}: {said}", file=sys.stderr)
