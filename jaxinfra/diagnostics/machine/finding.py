"""Findings: the lines that ``jaxinfra doctor`` prints."""

import dataclasses
import enum
from collections.abc import Iterable


class Grade(enum.StrEnum):
    """Grades of a finding: ok, unknown, warn or fail."""

    OK = "ok"
    UNKNOWN = "unknown"  # the machine does not provide the reading
    WARN = "warn"  # works, and costs speed or may change results
    FAIL = "fail"  # jobs here hang, crash or give wrong numbers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One reading of ``jaxinfra doctor``, with its rule and the remedy if it breaks the rule."""

    subject: str  # such as "gpu 0: power"
    grade: Grade
    value: str
    rule: str
    remedy: str = ""  # empty where nothing is to be done

    def __post_init__(self) -> None:
        assert self.remedy or self.grade in (Grade.OK, Grade.UNKNOWN), self.subject


def graded(
    subject: str, value: str, *, ok: bool, rule: str, remedy: str, otherwise: Grade = Grade.WARN
) -> Finding:
    """Returns a finding graded ``OK``, or else graded ``otherwise`` and with its remedy."""
    grade = Grade.OK if ok else otherwise
    text = "" if ok else remedy
    return Finding(subject=subject, grade=grade, value=value, rule=rule, remedy=text)


def not_known(subject: str, why: str, *, rule: str) -> Finding:
    """Returns a finding for a reading that this machine does not provide."""
    return Finding(subject=subject, grade=Grade.UNKNOWN, value=why, rule=rule)


def headline(findings: Iterable[Finding]) -> str:
    """Returns the first line that ``jaxinfra doctor`` prints: the most urgent remedy."""
    order = (Grade.FAIL, Grade.WARN)
    alarms = sorted(
        (each for each in findings if each.grade in order), key=lambda each: order.index(each.grade)
    )
    if not alarms:
        return "Nothing found that needs a remedy."
    said = [f"{each.subject}: {each.value}. Remedy: {each.remedy}." for each in alarms]
    return f"{alarms[0].grade.upper()}: " + " Then ".join(said)


def worst(findings: Iterable[Finding]) -> Grade:
    """Returns the most serious grade of the findings; ``OK`` if all are ok or unknown."""
    grades = {finding.grade for finding in findings}
    return next((grade for grade in (Grade.FAIL, Grade.WARN) if grade in grades), Grade.OK)
