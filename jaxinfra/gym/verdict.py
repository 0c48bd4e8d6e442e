"""The gym's faults by number, and what is said about each."""

import dataclasses
import time
import traceback
from collections.abc import Callable

from jaxinfra.core.errors import JaxinfraError
from jaxinfra.gym.arena import Arena

type Fault = Callable[[Arena], str]
"""Injects a fault, and returns the evidence that nothing was lost, or raises NotProvenError."""

FAULTS: dict[int, tuple[str, Fault]] = {}


def fault(number: int, title: str) -> Callable[[Fault], Fault]:
    """Enters a function under its number in the list of faults (docs/faults.md)."""

    def enter(function: Fault) -> Fault:
        assert number not in FAULTS
        FAULTS[number] = (title, function)
        return function

    return enter


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one fault."""

    number: int
    title: str
    passed: bool
    evidence: str
    seconds: float


def judge(number: int, arena: Arena) -> Verdict:
    """Runs one fault."""
    title, function = FAULTS[number]
    began = time.monotonic()
    try:
        evidence, passed = function(arena), True
    except JaxinfraError as error:
        evidence, passed = str(error), False
    except Exception as error:  # whatever a fault did, the next ones are still to be judged
        where = traceback.extract_tb(error.__traceback__)[-1]
        evidence, passed = f"{error!r} at {where.filename}:{where.lineno}", False
    return Verdict(
        number=number,
        title=title,
        passed=passed,
        evidence=evidence,
        seconds=time.monotonic() - began,
    )
