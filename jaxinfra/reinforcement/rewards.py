"""Rewards of completions, computed in worker processes with limits of time and memory.

A worker is ``python -m jaxinfra.reinforcement.rewards CONFIG``: one JSON object per line in, one
out. It imports no JAX.
"""

import concurrent.futures
import contextlib
import dataclasses
import enum
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

from jaxinfra.config import codec
from jaxinfra.config.rl import RlConfig
from jaxinfra.errors import ConfigError, JaxinfraError
from jaxinfra.reinforcement.ready import find_reward
from jaxinfra.runtime.files import is_of_type

_START_S = 300.0  # the longest that the modules of a reward may take to be imported


class Failure(enum.StrEnum):
    """Reasons why a completion has no reward."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    DIED = "died"  # the process ended, as for want of memory
    UNFINISHED = "unfinished"  # a reply in place of a reward, and no turn or room is left


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The reward of a completion, or why it has none: a failure, or a reply that it follows."""

    reward: float | None
    reply: str | list[dict[str, Any]] | None = None
    failure: Failure | None = None
    text: str = ""  # of an exception


@final
class RewardPool:
    """Processes that compute rewards; threads wait for them.

    A process that exceeds its time is killed, with all that it started, and replaced.

    Raises:
        ConfigError: there is no reward of that name.
    """

    def __init__(self, config: RlConfig):
        self._config = config
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._threads = concurrent.futures.ThreadPoolExecutor(
            config.reward_workers, thread_name_prefix="reward"
        )
        try:
            self._threads.submit(lambda: self._worker().start()).result()
        except ConfigError:
            self.close()
            raise

    def submit(
        self, completion: str | Sequence[str], *, prompt: str, row: Mapping[str, Any]
    ) -> concurrent.futures.Future[Scored]:
        """Starts to compute the reward of a completion, or of an episode's texts so far; never
        raises for what the function does.
        """
        request = {"completion": completion, "prompt": prompt, "row": row}
        return self._threads.submit(lambda: self._worker().ask(request))

    def _worker(self) -> "_Worker":
        if not hasattr(self._local, "worker"):
            self._local.worker = _Worker(self._config)
            self._workers.append(self._local.worker)
        return self._local.worker

    def close(self) -> None:
        """Ends all processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class _Worker:
    """One process, which is started when it is needed."""

    def __init__(self, config: RlConfig):
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def start(self) -> subprocess.Popen[bytes]:
        """Returns the running process; raises ConfigError if it does not find the reward."""
        if self._process is not None:
            return self._process
        module, config = "jaxinfra.reinforcement.rewards", codec.to_dict(self._config)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "JAX_PLATFORMS": "cpu",  # the device's memory belongs to engine and trainer
            },
            start_new_session=True,
        )
        self._read = b""
        said = self._answer(_START_S)
        if said is None or "refused" in said:
            self.end()
            why = said["refused"] if said else "its process ended, or took too long to start"
            raise ConfigError(f"rl.reward={self._config.reward!r}: {why}")
        return self._process

    def ask(self, request: Mapping[str, Any]) -> Scored:
        """Returns the reward, or the failure."""
        process = self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.end()
            return Scored(reward=None, failure=Failure.DIED)
        began = time.monotonic()
        said = self._answer(self._config.reward_timeout_s)
        if said is None:
            late = time.monotonic() - began >= self._config.reward_timeout_s
            self.end()
            return Scored(reward=None, failure=Failure.TIMED_OUT if late else Failure.DIED)
        if "raised" in said:
            return Scored(reward=None, failure=Failure.RAISED, text=said["raised"])
        if "reply" in said:
            return self._replied(said["reply"])
        if not math.isfinite(said["reward"]):
            return Scored(reward=None, failure=Failure.NOT_FINITE)
        return Scored(reward=said["reward"])

    def _replied(self, reply: Any) -> Scored:
        if self._config.max_turns > 1 and is_of_type(reply, str | list[dict[str, Any]]):
            return Scored(reward=None, reply=reply)
        why = f"{reply!r:.60} in place of a number; replies need rl.max_turns over 1"
        return Scored(reward=None, failure=Failure.RAISED, text=why)

    def _answer(self, limit_s: float) -> dict[str, Any] | None:
        """The next line; None if the process ends or the time is over before."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe, until = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return None
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it has not read is of no use
                pipe.close()


def main() -> None:
    """Answers requests of a pool until the standard input ends."""
    config = codec.from_dict(RlConfig, json.loads(sys.argv[1]))
    memory_bytes = int(config.reward_memory_gib * 2**30)
    # What the function prints or reads must not come between requests and answers.
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        reward = find_reward(config)
    except JaxinfraError as error:
        answer(refused=str(error))
        return
    answer(ready=True)
    for line in requests:
        asked = json.loads(line)
        try:
            value = reward(asked["completion"], prompt=asked["prompt"], row=asked["row"])
            if isinstance(value, str | list):
                answer(reply=value)
            else:
                answer(reward=float(value))
        except Exception as error:
            answer(raised=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
