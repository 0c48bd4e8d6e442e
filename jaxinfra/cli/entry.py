"""Where a process of the command line begins: signals first, then everything else."""

import sys

from jaxinfra.core.signals import guard_process


def main() -> int:
    """Runs the command that the arguments name; returns its exit code."""
    guard_process()
    from jaxinfra.cli.main import main as run  # after the guard: it takes its time

    return run(sys.argv[1:])
