"""Runs that several tests read, made once a session."""

import pytest
from e2e.runs import Bench, make_text


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Bench:
    """The text, the compiled programs, and the run that was never interrupted."""
    place = tmp_path_factory.mktemp("shared")
    return Bench(place, cache=place / "cache", text=make_text(place / "text"))


@pytest.fixture(scope="session")
def whole(shared):
    """A run of ``STEPS`` steps without interruption."""
    ended = shared.run(shared.new("whole"))
    assert (ended.code, ended.stderr) == (0, ""), ended
    return shared / "whole"


@pytest.fixture
def bench(shared, tmp_path) -> Bench:
    """A place of the test's own."""
    return Bench(tmp_path, cache=shared.cache, text=shared.text)
