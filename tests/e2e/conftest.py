"""Runs that several tests read, made once for all workers of a session."""

import fcntl
from pathlib import Path

import pytest
from e2e.runs import Bench, make_text


@pytest.fixture(scope="session")
def together(tmp_path_factory, worker_id) -> Path:
    """A place that all workers have: the text, compiled programs, and the uninterrupted run."""
    here = tmp_path_factory.getbasetemp()
    place = (here if worker_id == "master" else here.parent) / "together"
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            bench = Bench(place, cache=place / "cache", text=make_text(place / "text"))
            arguments = bench.new("whole")
            arguments.remove("--no-sample")
            ended = bench.run(arguments)
            assert (ended.code, ended.stderr) == (0, ""), ended
            (place / "said").write_text(ended.stdout)
            (place / "made").touch()
    return place


@pytest.fixture(scope="session")
def shared(together, tmp_path_factory) -> Bench:
    """A place for the runs of one worker."""
    place = tmp_path_factory.mktemp("shared")
    return Bench(place, cache=together / "cache", text=together / "text")


@pytest.fixture(scope="session")
def whole(together) -> Path:
    """A run of ``STEPS`` steps without interruption."""
    return together / "whole"


@pytest.fixture(scope="session")
def said_by_whole(together) -> str:
    """What it printed, which was not onto a terminal."""
    return (together / "said").read_text()


@pytest.fixture
def bench(shared, tmp_path) -> Bench:
    """A place of the test's own."""
    return Bench(tmp_path, cache=shared.cache, text=shared.text)


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """A server that answers in letters."""
    from e2e.served_letters import Running  # what a server imports takes seconds

    served = Running(tmp_path_factory.mktemp("model"))
    with served.server.running():
        yield served
    served.thread.close()


@pytest.fixture(scope="session")
def client(running):
    """OpenAI's own, of that server."""
    import openai
    from e2e.served_letters import KEY

    with openai.OpenAI(base_url=f"{running.server.address}/v1", api_key=KEY, max_retries=0) as made:
        yield made
