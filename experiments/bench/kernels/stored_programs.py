"""Compiled programs on disk: made by many processes at once, timed by one that compiles nothing.

Tracing holds Python's lock, so that threads of one process trace one program after another.
"""

import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

type Programs = dict[Any, jax.stages.Compiled | str]
"""By any key; in place of a program, what was raised where it should have been compiled."""


def compile_each(makers: Mapping[Any, Callable[[], jax.stages.Compiled]]) -> Programs:
    """Compiles what can be; one refusal does not end the others."""
    done: Programs = {}
    for key, make in makers.items():
        try:
            done[key] = make()
        except Exception as error:  # what it is, is a row of the table
            done[key] = repr(error)[:200]
    return done


def keep(path: pathlib.Path, programs: Programs) -> None:
    """Writes programs, whole or not at all."""
    ready = {
        key: each if isinstance(each, str) else serialize_executable.serialize(each)
        for key, each in programs.items()
    }
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(ready))
    part.rename(path)


def fetch(path: pathlib.Path) -> Programs:
    """Programs as ``keep`` wrote them, onto this process's device."""
    ready = pickle.loads(path.read_bytes())
    return {
        key: each if isinstance(each, str) else serialize_executable.deserialize_and_load(*each)
        for key, each in ready.items()
    }


def compile_in_processes(module: str, flags: list[str], processes: int) -> None:
    """Runs a benchmark's ``--compile`` for each part of its shapes, all at once.

    Raises:
        RuntimeError: one of them failed, so that programs are missing.
    """
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, *flags, "--processes=1", f"--part={i + 1}/{processes}"],
            env=env,
        )
        for i in range(processes)
    ]
    failed = [child.args for child in children if child.wait()]
    if failed:
        raise RuntimeError(f"{len(failed)} of {processes} processes failed to compile: {failed}")
