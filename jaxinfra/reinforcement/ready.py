"""Rewards that are ready to use: ``(completion, *, prompt, row) -> number``.

Worker processes run them. This module imports no JAX, so these start quickly.
"""

import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxinfra.config.parts import find_part
from jaxinfra.errors import DataError


class Reward(Protocol):
    """A function that gives the reward of one completion."""

    def __call__(self, completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
        """Returns a finite number: more for a better completion."""
        ...


def exact_match(completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's ``answer``, without blanks around them, else 0."""
    del prompt
    return float(completion.strip() == str(_of(row, "answer")).strip())


def pattern(completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
    """1 if the row's regular expression ``pattern`` is found in the completion, else 0."""
    del prompt
    return float(re.search(str(_of(row, "pattern")), completion) is not None)


_PROGRAM_S = 5.0
_PROGRAM_BYTES = 1 << 30
_CODE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def unit_tests(completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
    """1 if the completion's Python code passes the row's ``tests``, a program that follows it.

    The code is the last fenced block, or the whole completion. It runs in a process of its own, for
    ``timeout_s`` of the row (5 by default), with 1 GiB, no environment and an empty directory that
    is deleted. That stops accidents; it is no protection against hostile code, which could open
    files and connections.
    """
    del prompt
    tests, limit_s = str(_of(row, "tests")), float(row.get("timeout_s", _PROGRAM_S))
    blocks = _CODE.findall(completion)
    # A program that exits before its tests has not passed them.
    passed = secrets.token_hex(16)
    limits = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({_PROGRAM_BYTES},) * 2)"
    program = f"{limits}\n{blocks[-1] if blocks else completion}\n{tests}\nprint({passed!r})\n"
    with tempfile.TemporaryDirectory() as directory:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-"],
                cwd=directory,
                env={},
                input=program.encode(errors="replace"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 0.0
    return float(ended.returncode == 0 and ended.stdout.strip().endswith(passed.encode()))


def _of(row: Mapping[str, Any], field: str) -> Any:
    if field not in row:
        raise DataError(f"the prompt's row has no {field!r}; it has {', '.join(row)}")
    return row[field]


READY: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "pattern": pattern,
    "unit_tests": unit_tests,
}


def find_reward(name: str) -> Callable[..., Any]:
    """Returns a ready reward, or the user's own by its name (``jaxinfra.part``)."""
    return READY[name] if name in READY else find_part(name)
