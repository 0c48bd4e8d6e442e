"""Faults 31 and 32: one of two server replicas behind one address dies or hangs."""

import concurrent.futures
import os
import signal
from collections.abc import Callable
from pathlib import Path

from jaxinfra.faults.arena import Arena, NotProvenError, injected, require
from jaxinfra.faults.servers import PROMPTS, STEP, GymServer, Reply, body, serving
from jaxinfra.faults.verdict import fault

_LONG = 100  # new tokens of an answer that is still under way when something happens
_CHOICES = 8  # of it, of which a replica runs four at a time
_HANG_S = 3.0  # without a sign of life, after which a replica is taken to hang
_PATIENCE_S = 60.0  # of clients; many times what all of this takes


@fault(31, "a replica is killed", devices=1)
def kill_replica(arena: Arena) -> str:
    """Kills one of two server replicas behind one address while it answers requests.

    No client may hang: the other replica answers completely, streams already begun end with an
    error, and the dead replica is restarted.
    """
    with serving(arena, "f31", "--replicas", "2") as server:
        texts = server.texts()
        seen = _disturbed(
            server, texts, lambda: os.kill(_replica_pid(server, 0), signal.SIGKILL), how="has ended"
        )
        _require_back(server, texts, 0)
        return f"{seen}; started again, no page held"


@fault(32, "a replica hangs", devices=1)
def hang_replica(arena: Arena) -> str:
    """Blocks one replica's engine in a step, then suspends another replica's process.

    Both must be detected, killed and restarted, while no client waits for them.
    """
    stuck = injected(STEP, "sleep", 3600, call=20, rank=1, attempt=0)
    options = ("--replicas", "2", "--hang-seconds", f"{_HANG_S:g}")
    with serving(arena, "f32", *options, faults=[stuck]) as server:
        texts = server.texts()
        engine = _disturbed(server, texts, lambda: None, how="hangs")
        _require_hang(server, 1, "its engine has been at one step")
        _require_back(server, texts, 1)
        process = _disturbed(
            server, texts, lambda: os.kill(_replica_pid(server, 0), signal.SIGSTOP), how="hangs"
        )
        _require_hang(server, 0, "/health was not answered")
        _require_back(server, texts, 0)
        return f"an engine: {engine}; a process: {process}; both started again, no page held"


def _disturbed(
    server: GymServer, texts: list[str], disturb: Callable[[], None], *, how: str
) -> str:
    """Sends requests to both replicas while replica 0 is disturbed; returns the evidence.

    Args:
        how: text about the lost replica, sent to clients whose answer had begun.
    """
    before = server.series()["jaxinfra:repeated_requests_total"]
    asked = [body(p, new=_LONG, n=_CHOICES, stream=n % 2 > 0) for n, p in enumerate(PROMPTS)] * 2
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(server.ask, each, timeout_s=_PATIENCE_S) for each in asked]
        while server.series().get("vllm:num_requests_running 0", 0.0) < 1:
            require(not all(each.done() for each in waiting), "replica 0 was asked nothing")
        disturb()
        replies = [each.result() for each in waiting]
    whole = [reply for reply in replies if reply.status == 200 and not reply.error]
    lost = [reply for reply in replies if f"the replica that answered {how}" in reply.error]
    require(len(whole) + len(lost) == len(replies), f"neither whole nor told: {_unclear(replies)}")
    require(all(reply.is_whole for reply in whole), "a stream without its end, and no error")
    wrong = [r for r in whole if not any(r.text.startswith(text) for text in texts)]
    require(not wrong, f"answered otherwise: {wrong[:1]}")
    repeated = server.series()["jaxinfra:repeated_requests_total"] - before
    require(lost or repeated, "no request was at the replica that was lost")
    return (
        f"{len(whole)} of {len(replies)} answered as alone, {len(lost)} streams told, "
        f"{repeated:.0f} asked of the other replica"
    )


def _unclear(replies: list[Reply]) -> list[tuple[int, bool, str]]:
    return [(each.status, each.is_whole, each.error) for each in replies]


def _require_hang(server: GymServer, number: int, why: str) -> None:
    """Requires one hang to be found exactly once, in the log and in the metrics."""
    hangs = server.series()[f"jaxinfra:replica_hangs_total {number}"]
    require(hangs == 1, f"replica {number} was found to hang {hangs:.0f} times")
    said = f"replica {number} hangs ({why}"
    require(said in server.job.said(), f"the log does not say {said!r}")


def _require_back(server: GymServer, texts: list[str], number: int) -> None:
    """Requires a restarted replica to serve again, and both to answer as before."""
    server.job.wait_until(
        lambda: server.series()["jaxinfra:replica_up"] == 2, f"replica {number}'s second start"
    )
    series = server.series()
    restarts = series[f"jaxinfra:replica_restarts_total {number}"]
    require(restarts == 1, f"replica {number} was started again {restarts:.0f} times")
    require(server.texts() == texts, "its answers are others than before")
    server.wait_until_idle()


def _replica_pid(server: GymServer, number: int) -> int:
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            said = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has ended, or is another user's
        if f"JAXINFRA_REPLICA={number}".encode() in said and parent == server.job.process.pid:
            return int(path.parent.name)
    raise NotProvenError(f"replica {number} has no process")
