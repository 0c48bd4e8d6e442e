"""The one hook through which faults are injected: ``JAXINFRA_FAULTS``, a JSON list.

    [{"rank": 1, "attempt": 0, "target": "jaxinfra.training.job:Job.put", "call": 7,
      "action": "signal", "value": 9}]

As ``target`` is called for the ``call``-th time (with ``until``: from then to that call; with
``samples``: as its argument is an array with one of these numbers), the action happens before it,
or to what it returns. With ``once`` it waits until this path is there:

    signal           the process signals itself with ``value``
    sleep            ``value`` seconds; with ``hold_gil`` no thread of Python's runs meanwhile, with
                     ``in_c`` no handler of a signal does, as while XLA compiles
    raise            OSError with the number ``value``
    module:function  its result is ``function(result, plan)``

Nothing else in the system knows of faults; without the variable nothing is wrapped.
"""

import ctypes
import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import parse_json

VARIABLE = "JAXINFRA_FAULTS"


def arm(environment: Mapping[str, str], *, rank: int, attempt: int) -> int:
    """Installs the faults that are meant for this rank and attempt; returns their number."""
    text = environment.get(VARIABLE)
    if not text:
        return 0
    try:
        plans = parse_json(text, where=VARIABLE, holds=list[dict[str, Any]])
        mine = [
            plan
            for plan in plans
            if plan.get("rank", rank) == rank and plan.get("attempt", attempt) == attempt
        ]
        for plan in mine:
            _arm(plan)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(f"{VARIABLE}={text!r} cannot be armed: {error!r}") from error
    return len(mine)


def _arm(plan: Mapping[str, Any]) -> None:
    module, _, path = plan["target"].partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    original = getattr(owner, name)
    first = plan.get("call", 1)
    last = plan.get("until", first)
    samples = plan.get("samples")
    once = Path(plan["once"]) if "once" in plan else None
    act = _action(plan)
    calls = 0

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        now = first <= calls <= last
        if samples is not None:
            now = bool(np.isin(samples, args[-1]).any())
        if not now:
            return original(*args, **kwargs)
        while once is not None and not once.exists():
            time.sleep(0.01)
        return act(original, args, kwargs)

    setattr(owner, name, faulty)


def _action(plan: Mapping[str, Any]) -> Callable[..., Any]:
    kind, value = plan["action"], plan.get("value")

    def before(do: Callable[[], None]) -> Callable[..., Any]:
        def act(original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            do()
            return original(*args, **kwargs)

        return act

    if kind == "signal":
        return before(lambda: os.kill(os.getpid(), int(value or 0)))
    if kind == "sleep":
        if plan.get("in_c", False):
            return before(functools.partial(_sleep_in_c, int(value or 0)))
        hold = plan.get("hold_gil", False)
        # PyDLL calls C without letting other threads run.
        return before(
            functools.partial(ctypes.PyDLL(None).sleep, int(value or 0))
            if hold
            else functools.partial(time.sleep, float(value or 0))
        )
    if kind == "raise":

        def fail() -> None:
            raise OSError(int(value or 0), os.strerror(int(value or 0)))

        return before(fail)
    module, _, name = kind.partition(":")
    change = getattr(importlib.import_module(module), name)  # changes what the target returns

    def after(original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return change(original(*args, **kwargs), plan)

    return after


def _sleep_in_c(seconds: int) -> None:
    # A lock that nobody frees. Unlike sleep, its wait goes on after a signal.
    libc = ctypes.CDLL(None)
    lock = (ctypes.c_char * 64)()
    until = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_timedlock(lock, until)
