"""Starts the processes of replicas, watches them, and restarts them when they end."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from jaxinfra.errors import ConfigError, JaxinfraError
from jaxinfra.runtime.cluster import ATTEMPT
from jaxinfra.runtime.files import whole_number

REPLICA = "JAXINFRA_REPLICA"
"""Environment variable with a replica's number."""

FRONT = "JAXINFRA_FRONT"
"""Environment variable with the process id of a replica's front process."""

_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0  # a replica that served for longer is started again without a pause
_GPUS = Path("/proc/driver/nvidia/gpus")
_ADDRESS = re.compile(r" at (http://\S+): ")


class NoReplicaError(JaxinfraError):
    """A replica ended before it ever served, so that a restart would fail again."""


@final
class ReplicaProcess:
    """One replica's process, which a thread watches and restarts.

    Args:
        command: command line of a server on a free port, which prints its address in a line.
        say: called with the lines that the process prints, and with changes of its state.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        say: Callable[[str], None],
    ):
        self.number = number
        self.address: str | None = None  # while it serves
        self.num_open = self.num_starts = self.num_hangs = 0
        self.failure: str | None = None  # why it is not started again
        self._command, self._environment, self._say = command, environment, say
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"replica-{number}", daemon=True)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Context manager that counts one more open request of the replica."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def start(self) -> None:
        """Starts the process and the thread that watches it."""
        self._thread.start()

    def take_out(self, start: int, why: str) -> None:
        """Kills the process because it hangs; its thread restarts it once it has ended.

        Args:
            start: value of ``num_starts`` of the process that hangs; a later process is not killed.
            why: reason, for the log.
        """
        with self._lock:
            if self.num_starts != start or self._process is None:
                return
            self.address = None
            self.num_hangs += 1
            self._say(f"replica {self.number} hangs ({why}); killed, to be started again")
            self._process.kill()

    def ask_to_stop(self) -> None:
        """Asks the process to finish its requests and end; it is not restarted."""
        self._stopping.set()
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> None:
        """Waits up to ``seconds`` for the process to end, then kills it."""
        self._thread.join(max(0.0, seconds))
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        pause_s = 1.0
        while not self._stopping.is_set():
            begun = time.monotonic()
            code, served = self._once()
            if self._stopping.is_set():
                return
            if not served and self.num_starts == 1:
                self.failure = f"replica {self.number} ended with exit code {code} before it served"
                return
            pause_s = 0.0 if time.monotonic() - begun > _STEADY_S else pause_s
            self._say(
                f"replica {self.number} ended ({_ending(code)}); started again in {pause_s:g} s"
            )
            self._stopping.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, max(1.0, 2 * pause_s))

    def _once(self) -> tuple[int, bool]:
        """Runs one process to its end; returns its exit code, and whether it served."""
        with self._lock:
            if self._stopping.is_set():
                return 0, False
            told = {
                ATTEMPT: str(self.num_starts),
                REPLICA: str(self.number),
                FRONT: str(os.getpid()),
            }
            self.num_starts += 1
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **self._environment, **told},
                start_new_session=True,  # a terminal's Ctrl-C is for the front alone
            )
        served = False
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                found = _ADDRESS.search(line)
                if found is not None and not served:
                    served, self.address = True, found.group(1)
                self._say(f"replica {self.number}: {line.rstrip()}")
        self.address = None
        return process.wait(), served


@final
class Replicas:
    """The processes of all replicas.

    Args:
        command: command line that starts a replica.
        environments: each replica's environment variables, added to those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        say: Callable[[str], None],
    ):
        self.all = [
            ReplicaProcess(number, command, environment, say=say)
            for number, environment in enumerate(environments)
        ]

    @property
    def ready(self) -> list[ReplicaProcess]:
        """Replicas that accept requests now."""
        return [each for each in self.all if each.address is not None]

    def start(self, is_asked: Callable[[], object]) -> None:
        """Starts all replicas, and waits until all serve or ``is_asked`` returns a true value.

        Raises:
            NoReplicaError: a replica ended before it served.
        """
        for each in self.all:
            each.start()
        while len(self.ready) < len(self.all) and not is_asked():
            for each in self.all:
                if each.failure is not None:
                    raise NoReplicaError(f"{each.failure}; what it said stands above")
            time.sleep(0.05)

    def stop(self, seconds: float) -> None:
        """Asks all replicas to end, and kills those that take more than ``seconds``."""
        until = time.monotonic() + seconds
        for each in self.all:
            each.ask_to_stop()
        for each in self.all:
            if each.num_starts:
                each.wait(until - time.monotonic())


def environments(number: int, devices_each: int) -> list[dict[str, str]]:
    """Returns environment variables that give each replica its own GPUs; empty on a CPU.

    Raises:
        ConfigError: there are fewer GPUs than the replicas need.
    """
    if number < 1:
        raise ConfigError(f"--replicas {number} must be at least 1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(map(str, range(len([*_GPUS.glob("*")]))))
    gpus = [name for name in visible.split(",") if name]
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not gpus:
        return [{} for _ in range(number)]
    if number * devices_each > len(gpus):
        raise ConfigError(
            f"--replicas {number} of {devices_each} GPUs each need {number * devices_each}, "
            f"{len(gpus)} are here; start {math.floor(len(gpus) / devices_each)}, or give each a "
            "smaller --mesh"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[at * devices_each : (at + 1) * devices_each])}
        for at in range(number)
    ]


def end_with_front() -> None:
    """Watches the front process from a thread, and asks this process to stop when it has ended. Its
    process id comes from the environment, as it may end while this process starts.
    """
    parent = whole_number(os.environ.get(FRONT, ""))

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="parent", daemon=True).start()


def serve_command(words: Sequence[str]) -> list[str]:
    """Returns the command line that starts a replica with these arguments."""
    return [sys.executable, "-m", "jaxinfra", "serve", *words, "--host=127.0.0.1", "--port=0"]


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
