"""Small multi-process jobs to inject faults into, and the comparison of their runs."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from jaxinfra.checkpoint import directory_layout
from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.errors import JaxinfraError
from jaxinfra.runtime.files import read_log
from jaxinfra.runtime.injected_faults import VARIABLE
from jaxinfra.runtime.recorder import RankRecord, read_record, read_records, record_file
from jaxinfra.training.job import make_job

STEPS = 12
SAVE_EVERY = 4
# What the faults are timed by, whatever the user's config says, and what the mesh here asks for.
SETTINGS = (
    f"training.steps={STEPS}",
    "optimizer.warmup_steps=2",  # the steps that there are must learn something
    "training.evaluate_every=6",
    f"checkpoint.every={SAVE_EVERY}",
    "checkpoint.keep_last=2",
    "reliability.hash_every=4",
    "sharding.zero=3",
    "sharding.sequence_parallel=false",
)
# XLA's older code generator and none of LLVM's passes, in the one thread that waits for them. A
# device that comes late to a collective is a busy machine's: by default XLA ends a job after 40 s.
_COMPILE_FAST = (
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
_TIMEOUT_S = 900.0
_TIMES = ("step_s", "tokens_per_s", "mfu", "stall_s", "elapsed_s", "peak_bytes")
# Phases of a step, which the watchdog bounds.
_SHORT = ("input", "place", "step", "wait", "evaluate", "host")
_LOADING = threading.Lock()  # one state in memory at a time, in any thread
WORDS = ("the", "model", "layer", "of", "token", "reads", "writes", "loss", "step", "data", "mesh")


class NotProvenError(JaxinfraError):
    """Raised if a condition of a fault's verdict does not hold; the message says what was seen."""


def require(condition: object, text: str) -> None:
    """Raises NotProvenError with ``text`` unless the condition holds."""
    if not condition:
        raise NotProvenError(text)


def record_of(recorder: Path, rank: int) -> RankRecord:
    """Reads one rank's flight recorder from a run's recorder directory."""
    record = read_record(record_file(recorder, rank))
    if record is None:
        raise NotProvenError(f"rank {rank} does not record")
    return record


def injected(target: str, action: str, value: float = 0, *, call: int = 1, **more: Any) -> dict:
    """Returns the plan of a fault in a call of a function (``runtime/injected_faults.py``)."""
    return {"target": target, "action": action, "value": value, "call": call} | more


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Exit code, output and duration of a job that has ended."""

    code: int
    said: str  # stdout and stderr
    seconds: float
    at: float  # wall time

    def require(self, code: int, *texts: str) -> None:
        """Requires the job's exit code, and that it said these texts."""
        require(self.code == code, f"exit {self.code}, expected {code}: {self.said[-2000:]}")
        for text in texts:
            require(text in self.said, f"it did not say {text!r}: {self.said[-2000:]}")

    def line(self, words: str) -> str:
        """Returns the first line of the output that has these words."""
        return next(line for line in self.said.splitlines() if words in line)[:400]


@final
class RunningJob:
    """A ``jaxinfra launch`` job that is running, with its log and run directory."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, run: Path):
        self.process, self._log, self.run = process, log, run
        self._began = time.monotonic()

    def said(self) -> str:
        """Returns the text that the job has printed so far."""
        return self._log.read_text(errors="replace")

    def pid_of(self, rank: int) -> int:
        """Returns the process id of a rank of the job."""
        return self.record_of(rank).pid

    def record_of(self, rank: int) -> RankRecord:
        """Reads the flight recorder of one of the job's ranks."""
        return record_of(self.run / "recorder", rank)

    def wait_for_step(self, step: int) -> None:
        """Waits until the run's metrics file has the complete line of a step."""
        self.wait_until(
            lambda: any(record["step"] >= step for record in metrics(self.run)),
            f"step {step}",
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds; ``what`` names it in the error if it takes too long."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            require(self.process.poll() is None, f"it ended before {what}: {self.said()[-2000:]}")
            require(time.monotonic() < deadline, f"no {what} in {_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def end(self) -> Ended:
        """Waits for the job to end; returns its exit code, output and duration."""
        try:
            code = self.process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(90)
            raise NotProvenError(f"not ended after {_TIMEOUT_S:g} s") from None
        seconds = time.monotonic() - self._began
        return Ended(code=code, said=self.said(), seconds=seconds, at=time.time())


@final
class Arena:
    """Directory of the runs of one ``jaxinfra faults`` command; several threads may share it.

    Args:
        options: ``jaxinfra train`` options of the user's own config; empty: a tiny model. The arena
            itself sets the mesh and the settings in ``SETTINGS``; ``own_config`` refuses these.
        processes: number of processes of an ordinary job, each with one CPU device.
    """

    def __init__(self, directory: Path, *, options: Sequence[str], processes: int):
        self.directory, self.processes = directory, processes
        directory.mkdir(parents=True, exist_ok=True)
        self._options = list(options) or _tiny(directory)
        self._log_numbers = itertools.count(1)
        self._lock = threading.Lock()
        # A lock each: who asks for a run that another thread makes waits for that one alone.
        self._references: dict[tuple[str, ...], tuple[Path, threading.Lock]] = {}

    def settings(self, *settings: str, processes: int | None = None) -> list[str]:
        """Returns the ``jaxinfra train`` arguments of a run, without its run directory."""
        mesh = f"replica={processes or self.processes}"
        sets = [f"--set={setting}" for setting in (*SETTINGS, *settings)]
        cache = ["--cache", str(self.directory / "cache")]
        # Nobody reads a sample, which takes one process longer than all of these steps.
        return ["train", *self._options, *sets, "--mesh", mesh, *cache, "--no-sample"]

    @contextlib.contextmanager
    def launch(
        self,
        run: str,
        command: Sequence[str],
        *,
        faults: Sequence[Mapping[str, Any]] = (),
        processes: int | None = None,
        restarts: int = 2,
        options: Sequence[str] = (),
    ) -> Iterator[RunningJob]:
        """Starts a job with ``jaxinfra launch``; the ``with`` block's end kills its processes.

        Args:
            run: name of the run's directory in the arena.
            command: ``train`` arguments from ``settings``; or ``["--resume", ...]`` to continue the
                run, with further arguments.
            faults: faults to inject into the job's processes, from ``injected``.
            processes: number of processes; None: the arena's.
            restarts: most restarts without progress.
            options: further options of ``jaxinfra launch``.
        """
        where = ["--run", str(self.directory / run)]
        if command[0] == "--resume":
            where = ["--cache", str(self.directory / "cache"), *command[1:]]
            command = ["train", "--resume", str(self.directory / run)]
        words = [
            *("launch", "-n", str(processes or self.processes), "--restarts", str(restarts)),
            *("--backoff", "0.2", *options, "--", *command, *where),
        ]
        with self.start(words, run=run, environment={VARIABLE: json.dumps(list(faults))}) as job:
            yield job

    @contextlib.contextmanager
    def start(
        self, words: Sequence[str], *, run: str, environment: Mapping[str, str]
    ) -> Iterator[RunningJob]:
        """Starts ``jaxinfra`` with the arguments ``words`` and a changed environment."""
        log = self.directory / f"{run}.{next(self._log_numbers)}.log"
        # Jobs here are many, alike and short: even small programs are worth keeping.
        keep = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        changed = {**os.environ, "JAX_PLATFORMS": "cpu", **keep, **environment}
        # One device a process, where nothing else is asked for; a compilation is most of a job.
        changed["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {_COMPILE_FAST}".strip()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxinfra", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=changed,
            )
        try:
            yield RunningJob(process, log, self.directory / run)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def run(self, run: str, command: Sequence[str], **options: Any) -> Ended:
        """Launches a job, waits for its end, and returns its exit code and output."""
        with self.launch(run, command, **options) as job:
            return job.end()

    def reference(self, *settings: str, processes: int | None = None) -> Path:
        """Returns the directory of a run without faults; trains that run at the first call."""
        count = processes or self.processes
        key = (str(count), *settings)
        with self._lock:
            new = self.directory / f"reference-{len(self._references)}", threading.Lock()
            run, making = self._references.setdefault(key, new)
        with making:
            if not (run / "summary.json").exists():
                command = self.settings(*settings, processes=count)
                self.run(run.name, command, restarts=0, processes=count).require(0)
        return run

    def longest_phase_s(self) -> float:
        """Returns seconds of the longest phase in a run without faults, to derive time limits."""
        phases = [
            [
                ended.value
                for begun, ended in itertools.pairwise(record.events)
                if begun.name in _SHORT
            ]
            for record in read_records(self.reference() / "recorder")
        ]
        return max(itertools.chain(*phases))

    def start_s(self) -> float:
        """Returns the seconds that one process takes to start here, mostly for imports."""
        with self.start(["train", "--help"], run="start", environment={}) as job:
            return job.end().seconds

    def require_same(self, run: str, *settings: str, processes: int | None = None) -> str:
        """Requires a run's last state and samples to equal those of the run without faults.

        Args:
            settings: settings of the run without faults; if empty, all metrics are compared too.
        """
        want, got = self.reference(*settings, processes=processes), self.directory / run
        sums, expected = state_sums(got, STEPS), state_sums(want, STEPS)
        different = [name for name in expected if sums.get(name) != expected[name]]
        require(not different, f"differs from the undisturbed run in {', '.join(different[:5])}")
        require(ledger(got) == ledger(want), "the ledgers of samples differ")
        require(settings or values(got) == values(want), "metrics.jsonl has other values")
        return (
            f"B: {len(sums)} arrays of step {STEPS} equal the undisturbed run's, SHA-256 "
            f"{combined(sums)[:12]}; L: its ledger of samples too"
        )


def _tiny(directory: Path) -> list[str]:
    text = directory / "text"
    if not text.exists():
        text.mkdir()
        rng = random.Random(0)
        for number in range(12):
            words = " ".join(rng.choice(WORDS) for _ in range(70))
            (text / f"{number:03d}.txt").write_text(words + "\n")
    settings = {
        "training.batch_size": 8,
        "training.sequence_length": 16,
        "data.heldout_fraction": 0.2,
        "data.tokenizer.kind": "bytes",
        "model.vocab_size": 300,
        "model.model_dim": 32,
        "model.stacks.0.repeats": 1,
        "model.stacks.0.pattern.0.mixer.head_dim": 8,
        "model.stacks.0.pattern.0.feed_forward.hidden_dim": 64,
        "optimizer.muon": "none",  # which takes longer to compile than all of these steps to run
        "optimizer.learning_rate": 4e-3,
    }
    return ["tiny", "--data", str(text), *(f"--set={k}={v}" for k, v in settings.items())]


def state_sums(run: Path, step: int, mesh: MeshConfig | None = None) -> dict[str, str]:
    """Returns SHA-256 sums of the arrays and data position that a checkpoint resumes from."""
    directory = RunDirectory(run)
    config = dataclasses.replace(
        directory.read_config(), mesh=mesh or MeshConfig(), sharding=ShardingConfig()
    )
    with _LOADING:
        restored = load_state(directory.checkpoints, make_job(config).abstract_state(), step=step)
    sums = {
        jax.tree_util.keystr(path, simple=True, separator="/"): hashlib.sha256(
            np.asarray(leaf).tobytes()
        ).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(restored.state)
    }
    # Batches that a run skipped, or was told to leave out, are those it did not learn from.
    position = {name: value for name, value in restored.data_state.items() if name != "excluded"}
    return sums | {"data": json.dumps(position, sort_keys=True)}


def combined(sums: Mapping[str, str]) -> str:
    """Returns one SHA-256 sum over many."""
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def metrics(run: Path) -> list[dict[str, Any]]:
    """Reads all lines of a run's ``metrics.jsonl``."""
    return _lines(run / "metrics.jsonl")


def _lines(file: Path) -> list[dict[str, Any]]:
    found, damaged = read_log(file, holds=dict[str, Any])
    require(not damaged, f"{file} has damaged lines: {damaged}")
    return found


def values(run: Path) -> list[dict[str, Any]]:
    """Reads a run's metrics without the fields that depend on the clock."""
    return [
        {name: value for name, value in record.items() if name not in _TIMES}
        for record in metrics(run)
    ]


def ledger(run: Path) -> list[tuple[int, int, int, str, bool]]:
    """Returns each step's number, first and last sample, batch sum, and if it was trained on."""
    entries, skipped = [], 0
    for record in metrics(run):
        if "batch" not in record:
            continue
        before, skipped = skipped, record.get("skipped", skipped + 1)
        entries.append((record["step"], *record["samples"], record["batch"], skipped == before))
    return entries


def incidents(run: Path, kind: str) -> list[dict[str, Any]]:
    """Reads a run's incidents of one kind from its ``incidents.jsonl``."""
    return [found for found in _lines(run / "incidents.jsonl") if found["kind"] == kind]


def single_incident(run: Path, kind: str) -> dict[str, Any]:
    """Returns a run's only incident of a kind; raises NotProvenError if there are more or none."""
    found = incidents(run, kind)
    if len(found) != 1:
        every = [(one["kind"], one["step"]) for one in _lines(run / "incidents.jsonl")]
        raise NotProvenError(f"{len(found)} incidents {kind!r}, expected one; there are {every}")
    return found[0]


def saved_steps(run: Path) -> list[int]:
    """Returns the steps at which a run committed checkpoints."""
    return directory_layout.steps(run / "checkpoints")
