"""Each cause, made to happen in small jobs, is the first that is named; a healthy job has none."""

import pytest

from jaxinfra.gym.arena import Arena
from jaxinfra.gym.causes import CAUSES


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    return Arena(tmp_path_factory.mktemp("causes"), options=(), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_first(name, arena):
    found = CAUSES[name](arena)
    assert found.is_first, found
    if found.predicted_ms is not None:
        assert found.predicted_ms == pytest.approx(found.measured_ms, rel=0.2), found
