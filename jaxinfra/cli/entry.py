"""Entry point of the command line, which installs signal handlers before everything else."""

import gc
import io
import signal
import sys

GARBAGE_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of Python's garbage collector, for the many long-lived objects of imports and tracing.
At Python's default, a collection every 700 objects takes a sixth of their time."""


def main() -> int:
    """Runs the command that the process's arguments name; returns its exit code."""
    # Python's own handler would show where a SIGINT came, which helps no user yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    # These take their time.
    from jaxinfra.runtime.signals import (
        end_without_waiting,
        guard_process,
        ignore_signals_at_exit,
    )

    guard_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may know few characters
    from jaxinfra.cli.main import main as run

    try:
        code = run(sys.argv[1:])
    finally:
        ignore_signals_at_exit()
    end_without_waiting(code)
    return code
