"""The command line in processes of their own, to be signalled, killed and refused.

They are forked from a server that has imported everything: importing takes longer than a small
run. ``python -m jaxinfra`` as people start it has a test of its own.
"""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import fast_compiling
import jax

from jaxinfra.cli.entry import GARBAGE_THRESHOLDS
from jaxinfra.cli.main import main
from jaxinfra.runtime.signals import guard_process

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        __name__,
        *(f"jaxinfra.cli.{name}" for name in ("train_job", "evaluate", "generate")),
        # What a run imports late: to lower its step, to show it, and to draw its loss.
        *("jaxlib.mlir.dialects.mhlo", "rich.live", "jaxinfra.training.summary"),
        *("matplotlib.figure", "matplotlib.backends.backend_agg"),
        *(f"PIL.{name}ImagePlugin" for name in ("Bmp", "Gif", "Jpeg", "Png", "Ppm")),
    ]
)
# Generous: these tests share two cores with others.
_TIMEOUT_S = 240
_SUFFIXES = (".out", ".err")


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int  # minus the signal's number where one killed it
    stdout: str
    stderr: str

    def lines(self) -> list[str]:
        """What it said on stderr."""
        return self.stderr.splitlines()


class Running:
    """A command that is running; ``end`` waits for it."""

    def __init__(self, process: BaseProcess, log: Path):
        self._process = process
        self._log = log

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def wait_until(self, condition: Callable[[str], bool]) -> None:
        """Until what it has printed is as asked for, or it has ended."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition(self._said()[0]) and self._process.is_alive():
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.002)

    def end(self) -> Ended:
        self._process.join(_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            raise AssertionError(f"not ended after {_TIMEOUT_S} s: {self._said()}")
        assert self._process.exitcode is not None
        return Ended(self._process.exitcode, *self._said())

    def _said(self) -> tuple[str, str]:
        out, err = (self._log.with_suffix(suffix).read_text() for suffix in _SUFFIXES)
        return out, err


@contextlib.contextmanager
def start(
    *arguments: object,
    log: Path,
    before: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Running]:
    """Starts ``jaxinfra ARGUMENTS``.

    Args:
        log: path without suffix for what it prints.
        before: a picklable function to call in the process first, such as one that arms a fault.
    """
    words = [str(argument) for argument in arguments]
    for suffix in _SUFFIXES:
        log.with_suffix(suffix).touch()
    process = _CONTEXT.Process(target=_child, args=(words, log, before, environment or {}))
    process.start()
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.join()


def run(*arguments: object, log: Path, **options) -> Ended:
    """Runs ``jaxinfra ARGUMENTS`` to its end."""
    with start(*arguments, log=log, **options) as running:
        return running.end()


def _child(
    arguments: list[str],
    log: Path,
    before: Callable[[], None] | None,
    environment: dict[str, str],
) -> None:
    for descriptor, suffix in zip((1, 2), _SUFFIXES, strict=True):
        file = os.open(log.with_suffix(suffix), os.O_WRONLY)
        os.dup2(file, descriptor)
    flags = f"{environment.get('XLA_FLAGS', '')} {fast_compiling.FLAGS}"
    os.environ.update(environment | {"XLA_FLAGS": flags})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # With a size, entries are written and read under a lock: workers share them.
    jax.config.update("jax_compilation_cache_max_size", 1 << 30)
    if before is not None:
        before()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    guard_process()
    sys.exit(main(arguments))
