"""Faults for a process to arm before it starts: picklable, and exact where time is not."""

import functools
import importlib
import os
import resource
import signal
from collections.abc import Callable


def signal_at(target: str, number: signal.Signals, *, call: int = 1) -> Callable[[], None]:
    """The process signals itself as it enters the n-th call of ``"module:attribute"``."""
    return functools.partial(_arm, target, int(number), call)


def _arm(target: str, number: int, call: int) -> None:
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, interrupted)


def file_size_limit(num_bytes: int) -> Callable[[], None]:
    """As if the disk had room for that much of each file only."""
    limits = (num_bytes, num_bytes)
    return functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)


def terminal(writing: int) -> Callable[[], None]:
    """The standard output is this terminal, one end of ``pty.openpty()``."""
    return functools.partial(_write_to, os.ttyname(writing))


def _write_to(name: str) -> None:
    os.dup2(os.open(name, os.O_WRONLY | os.O_NOCTTY), 1)
