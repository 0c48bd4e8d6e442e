"""Rewards that are ready to use: ``(completion, *, prompt, row) -> number``.

Worker processes run them. This module imports no JAX, so these start quickly.
"""

import functools
import importlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxinfra.config.parts import find_part
from jaxinfra.config.rl import JudgeConfig, RlConfig
from jaxinfra.errors import ConfigError, DataError, nearest


class Reward(Protocol):
    """A function that gives the reward of one completion."""

    def __call__(
        self, completion: Any, *, prompt: str, row: Mapping[str, Any]
    ) -> float | str | list[dict[str, Any]]:
        """Returns a finite number: more for a better completion.

        With ``rl.max_turns`` over 1, ``completion`` is the list of all texts so far: completions,
        and the replies between them. A text, or a list of messages, is then the next reply.
        """
        ...


def exact_match(completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's ``answer``, without blanks around them, else 0."""
    del prompt
    return float(completion.strip() == str(_of(row, "answer")).strip())


def zero(completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
    """0, for algorithms that learn from no reward (``distill``)."""
    del completion, prompt, row
    return 0.0


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


def math_equal(completion: str, *, prompt: str, row: Mapping[str, Any]) -> float:
    """1 if the completion's last mathematical expression equals the row's ``answer``, else 0.

    Both may be LaTeX, also in ``\\boxed``, or plain text; ``math-verify`` parses and compares them,
    so 1/2, 0.5 and ``\\frac{1}{2}`` are equal. An answer without an expression raises DataError.
    """
    del prompt
    library = _math_verify()
    # Its own limits of time need signals; the pool's limit holds here.
    options = {"parsing_timeout": None}
    answer = str(_of(row, "answer"))
    expected = library.parse(f"${answer}$", **options) or library.parse(answer, **options)
    if not expected:
        raise DataError(f"answer={answer!r:.60} of the prompt's row is no mathematical expression")
    found = library.parse(completion, **options)
    return float(library.verify(expected, found, timeout_seconds=None))


def _math_verify() -> Any:
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(
            "rl.reward=math_equal needs the package math-verify: pip install 'jaxinfra[rl]'"
        ) from error


_TRIES = 4
_BUSY = (408, 429, 500, 502, 503, 504)  # what a server says that may answer later


def judge(completion: str, *, prompt: str, row: Mapping[str, Any], config: JudgeConfig) -> float:
    """The score that a judge model gives the completion (``rl.judge``).

    A server that is busy is asked again. An answer without a score raises DataError, so that the
    completion has no reward.
    """
    asked = config.asked(prompt=prompt, completion=completion, answer=str(row.get("answer", "")))
    body = {
        "model": config.model,
        "messages": [{"role": "user", "content": asked}],
        "temperature": 0.0,
        "max_tokens": config.max_new_tokens,
    }
    headers = {"Content-Type": "application/json"}
    if config.api_key_env is not None:
        if config.api_key_env not in os.environ:
            raise ConfigError(f"rl.judge.api_key_env={config.api_key_env} is not set; export it")
        headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
    request = urllib.request.Request(
        config.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
    )
    said = str(_sent(request)["choices"][0]["message"]["content"])
    scores = re.findall(config.score_pattern, said)
    if not scores:
        raise DataError(
            f"the judge gave no score that matches {config.score_pattern!r}: {said!r:.200}"
        )
    return float(scores[-1])


def _sent(request: urllib.request.Request) -> Any:
    for number in range(_TRIES):
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code not in _BUSY or number + 1 == _TRIES:
                raise
        time.sleep(0.5 * 2**number)
    raise AssertionError("the last try returns or raises")


def _of(row: Mapping[str, Any], field: str) -> Any:
    if field not in row:
        raise DataError(f"the prompt's row has no {field!r}; it has {', '.join(row)}")
    return row[field]


READY: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "pattern": pattern,
    "math_equal": math_equal,
    "unit_tests": unit_tests,
    "zero": zero,
}


def find_reward(config: RlConfig) -> Callable[..., Any]:
    """Returns a ready reward, or the user's own by its name (``jaxinfra.part``)."""
    if config.judge is not None:
        return functools.partial(judge, config=config.judge)
    if config.reward == "math_equal":
        _math_verify()  # it takes seconds to import, which no completion should wait for
    if config.reward in READY:
        return READY[config.reward]
    if ":" not in config.reward:
        hint = nearest(config.reward, (*READY, "judge"))
        raise ConfigError(f"no reward has this name, and your own has module:function{hint}")
    return find_part(config.reward)
