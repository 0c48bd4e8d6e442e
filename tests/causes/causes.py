"""Causes of a slow, sick or crowded job, made to happen, and whether a command names them first.

A cause is entered by the function that makes it happen and judges what is said of it
(``caused_runs``, ``caused_machines``, ``caused_traces``). A healthy state is entered likewise and
must be said to be one (``healthy``).
"""

import dataclasses
import re
from collections.abc import Callable

from jaxinfra.diagnostics.delays import Explanation
from jaxinfra.diagnostics.machine.finding import Finding, Grade, headline, worst
from jaxinfra.errors import JaxinfraError
from jaxinfra.faults.arena import Arena, require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CauseVerdict:
    """What was said first of something that one cause was made to happen to."""

    said: str  # the report's first words, up to its first remedy
    named: bool  # whether they are of this cause
    remedy: str = ""  # the first one
    predicted_ms: float | None = None  # that a step takes less with this remedy; None: not said
    measured_ms: float | None = None  # that it took less; None: not measured here


type Judge = Callable[[Arena], CauseVerdict]
type HealthCheck = Callable[[Arena], str]
"""Returns what was alarmed about; nothing where all is well."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One in the list."""

    command: str  # whose first words are judged
    made: str  # how it is made to happen
    runs: bool  # whether jobs are run for it
    judge: Judge

    def describe(self) -> str:
        """One line."""
        return self.made


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HealthyState:
    """Something in which nothing is wrong."""

    command: str
    what: str
    runs: bool
    check: HealthCheck

    def describe(self) -> str:
        """One line."""
        return f"healthy: {self.what}"


CAUSES: dict[str, Cause] = {}
HEALTHY: dict[str, HealthyState] = {}

TRACE, DIFFERENCE = "trace RUN", "trace A B"
DOCTOR, DATA = "doctor", "doctor data"
TRAIN = "train"


def cause(name: str, command: str, *, made: str, runs: bool = False) -> Callable[[Judge], Judge]:
    """Enters a function that makes a cause happen and judges what is said of it."""

    def enter(function: Judge) -> Judge:
        assert name not in CAUSES, name
        CAUSES[name] = Cause(command=command, made=made, runs=runs, judge=function)
        return function

    return enter


def healthy(
    name: str, command: str, *, what: str, runs: bool = False
) -> Callable[[HealthCheck], HealthCheck]:
    """Enters a function that says what a command finds wrong with something healthy."""

    def enter(function: HealthCheck) -> HealthCheck:
        assert name not in HEALTHY, name
        HEALTHY[name] = HealthyState(command=command, what=what, runs=runs, check=function)
        return function

    return enter


def judge_cause(name: str, arena: Arena) -> CauseVerdict:
    """Makes a cause happen; a job that did not run to its end is a cause that was not named."""
    try:
        return CAUSES[name].judge(arena)
    except JaxinfraError as error:
        return CauseVerdict(said=f"not run: {error}", named=False)


def check_health(name: str, arena: Arena) -> str:
    """What a command finds wrong with a healthy state: nothing, if all is well."""
    try:
        return HEALTHY[name].check(arena)
    except JaxinfraError as error:
        return f"not run: {error}"


def verdict_of_delays(
    explained: Explanation | None, *, words: str, measured_ms: float | None = None
) -> CauseVerdict:
    """Whether ``jaxinfra trace`` names a cause first.

    Args:
        words: what the first loss must say, as a regular expression.
    """
    require(explained is not None, "there are no steps to explain")
    assert explained is not None
    said = first_words(explained.paragraph())
    first = explained.delays[0] if explained.delays else None
    return CauseVerdict(
        said=said,
        named=first is not None and bool(re.search(words, said)),
        remedy="" if first is None else first.remedy,
        predicted_ms=None if first is None or measured_ms is None else first.ms,
        measured_ms=measured_ms,
    )


def verdict_of_findings(findings: list[Finding], *, words: str) -> CauseVerdict:
    """Whether ``jaxinfra doctor`` names a cause first."""
    said = first_words(headline(findings))
    graver = [each for each in findings if each.grade is Grade.FAIL]
    alarms = graver or [each for each in findings if each.grade is Grade.WARN]
    return CauseVerdict(
        said=said,
        named=bool(alarms) and bool(re.search(words, said)),
        remedy=alarms[0].remedy if alarms else "",
    )


def first_words(text: str) -> str:
    """Of a report, up to its first remedy."""
    return text.partition(" Remedy:")[0]


def alarms_of(explained: Explanation | None) -> str:
    """What ``jaxinfra trace`` says that a step loses; nothing where it loses nothing."""
    require(explained is not None, "there are no steps to explain")
    assert explained is not None
    return first_words(explained.paragraph()) if explained.delays else ""


def alarm_of(findings: list[Finding]) -> str:
    """What ``jaxinfra doctor`` says that needs a remedy; nothing where nothing does."""
    return "" if worst(findings) is Grade.OK else first_words(headline(findings))
