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
        # What a step would gain at most: devices work while the host waits.
        assert found.predicted_ms > 0.8 * found.measured_ms, found
