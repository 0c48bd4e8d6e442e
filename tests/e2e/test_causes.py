"""Causes made to happen in small jobs are named first, and their remedies win what was said."""

import pytest
from causes.cause_list import all_causes, all_healthy
from causes.causes import check_health, judge_cause

from jaxinfra.faults.arena import Arena

CAUSES, HEALTHY = all_causes(), all_healthy()

_ERROR = 0.2
"""Share of what a remedy wins by which its prediction may be off."""


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    return Arena(tmp_path_factory.mktemp("causes"), options=(), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, each in CAUSES.items() if each.runs])
def test_a_cause_is_named_first_with_what_is_won_without_it(name, arena):
    found = judge_cause(name, arena)
    assert found.named, found
    assert found.remedy
    if found.measured_ms is not None:
        assert found.predicted_ms == pytest.approx(found.measured_ms, rel=_ERROR), found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, each in HEALTHY.items() if each.runs])
def test_no_alarm_on_a_healthy_job(name, arena):
    assert check_health(name, arena) == ""
