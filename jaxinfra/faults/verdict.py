"""The numbered list of faults, and the verdict on each."""

import dataclasses
import time
import traceback
from collections.abc import Callable

from jaxinfra.errors import JaxinfraError
from jaxinfra.faults.arena import Arena

type Fault = Callable[[Arena], str]
"""Injects a fault, and returns the evidence that nothing was lost, or raises NotProvenError."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One numbered fault of the list, with its title and function."""

    title: str
    function: Fault
    devices: int  # number of devices of the fault's largest job


FAULTS: dict[int, Entry] = {}


def fault(number: int, title: str, *, devices: int = 2) -> Callable[[Fault], Fault]:
    """Returns a decorator that registers a function as a numbered fault (docs/faults.md)."""

    def enter(function: Fault) -> Fault:
        assert number not in FAULTS
        FAULTS[number] = Entry(title=title, function=function, devices=devices)
        return function

    return enter


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of one injected fault: whether it passed, and the evidence."""

    number: int
    title: str
    passed: bool
    evidence: str
    seconds: float


def judge(number: int, arena: Arena) -> Verdict:
    """Runs one numbered fault and returns its verdict."""
    entry = FAULTS[number]
    began = time.monotonic()
    try:
        evidence, passed = entry.function(arena), True
    except JaxinfraError as error:
        evidence, passed = str(error), False
    except Exception as error:  # whatever a fault did, the next ones still run
        where = traceback.extract_tb(error.__traceback__)[-1]
        evidence, passed = f"{error!r} at {where.filename}:{where.lineno}", False
    return Verdict(
        number=number,
        title=entry.title,
        passed=passed,
        evidence=evidence,
        seconds=time.monotonic() - began,
    )
