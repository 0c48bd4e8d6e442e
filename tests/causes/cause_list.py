"""All causes and healthy states, which the modules imported here enter."""

from causes import caused_data, caused_machines, caused_runs, caused_traces
from causes.causes import (
    CAUSES,
    DATA,
    DIFFERENCE,
    DOCTOR,
    HEALTHY,
    TRACE,
    TRAIN,
    Cause,
    HealthyState,
)

MODULES = (caused_runs, caused_traces, caused_machines, caused_data)
_COMMANDS = (TRACE, DIFFERENCE, TRAIN, DOCTOR, DATA)


def all_causes() -> dict[str, Cause]:
    """By name; what jobs are run for comes first, then by the command that looks."""
    return dict(sorted(CAUSES.items(), key=lambda item: _order(item[1])))


def all_healthy() -> dict[str, HealthyState]:
    """Likewise."""
    return dict(sorted(HEALTHY.items(), key=lambda item: _order(item[1])))


def _order(each: Cause | HealthyState) -> tuple[bool, int]:
    return not each.runs, _COMMANDS.index(each.command)
