"""Processes that meet before JAX starts: who came, who did not, and strangers."""

import contextlib
import json
import socket
import threading
import time

from jaxinfra.core.errors import LostPeerError
from jaxinfra.launch.cluster import Cluster
from jaxinfra.launch.rendezvous import PortTakenError, meet
from jaxinfra.launch.supervisor import free_port


def meet_all(
    present: list[int], *, of: int, port: int, timeout_s: float, host: str = "127.0.0.1"
) -> dict[int, object]:
    outcomes: dict[int, object] = {}

    def come(process: int) -> None:
        cluster = Cluster(
            host=host,
            port=port,
            num_processes=of,
            process_id=process,
            local_id=0,
            num_local=0,
            source="plain",
            token="a secret",
        )
        try:
            outcomes[process] = meet(cluster, timeout_s=timeout_s)
        except Exception as error:
            outcomes[process] = error

    threads = [threading.Thread(target=come, args=(process,)) for process in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


def test_processes_meet_and_agree_on_a_port():
    outcomes = meet_all([2, 0, 1], of=3, port=free_port(), timeout_s=20)
    assert len(outcomes) == 3
    assert len({*outcomes.values()}) == 1
    assert all(isinstance(port, int) for port in outcomes.values())


def test_who_is_absent_is_named_by_all():
    outcomes = meet_all([0, 2], of=4, port=free_port(), timeout_s=1.5)
    assert all(isinstance(outcome, LostPeerError) for outcome in outcomes.values())
    assert all("processes 1, 3 of 4" in str(outcome) for outcome in outcomes.values())


def test_without_process_0_it_is_named():
    outcomes = meet_all([1], of=2, port=free_port(), timeout_s=0.5)
    assert isinstance(outcomes[1], LostPeerError)
    assert "process 0 is absent" in str(outcomes[1])


def test_a_taken_port_is_named_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        outcomes = meet_all([0], of=2, port=port, timeout_s=20)
    assert isinstance(outcomes[0], PortTakenError)
    assert str(port) in str(outcomes[0])
    assert time.monotonic() - began < 5


def hello(token: str) -> bytes:
    said = {"greeting": "jaxinfra rendezvous 2", "process": 1, "of": 3, "token": token}
    return json.dumps(said).encode() + b"\n"


def test_who_does_not_know_the_token_gets_no_place_and_no_answer():
    port = free_port()
    answers: list[bytes] = []

    def pretend() -> None:
        for token in ("", "a guess", "a secret ", "\ud800"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(hello(token))
                stranger.settimeout(5)
                answers.append(stranger.recv(100))

    timer = threading.Timer(0.3, pretend)
    timer.start()
    late = threading.Timer(1.5, lambda: outcomes.update(meet_all([1, 2], of=3, port=port, **when)))
    when = {"timeout_s": 20}
    outcomes: dict[int, object] = {}
    late.start()
    outcomes |= meet_all([0], of=3, port=port, **when)
    late.join()
    timer.join()
    assert answers == [b""] * 4
    assert len(outcomes) == 3
    assert len({*outcomes.values()}) == 1, outcomes


def test_callers_that_say_nothing_keep_nobody_waiting():
    port = free_port()
    silent: list[socket.socket] = []

    def call() -> None:
        silent.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(20))

    timer = threading.Timer(0.2, call)
    timer.start()
    began = time.monotonic()
    late = threading.Timer(0.6, lambda: outcomes.update(meet_all([1], of=2, port=port, **when)))
    when = {"timeout_s": 30}
    outcomes: dict[int, object] = {}
    late.start()
    outcomes |= meet_all([0], of=2, port=port, **when)
    late.join()
    assert time.monotonic() - began < 5
    assert isinstance(outcomes[1], int)
    for each in silent:
        each.close()


def test_a_crowd_that_says_little_is_sent_away():
    """More than are heard at a time, each a byte a second: whoever belongs here gets in."""
    port, crowd = free_port(), []

    def call() -> None:
        crowd.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(90))
        for _ in range(8):
            for each in crowd:
                with contextlib.suppress(OSError):
                    each.send(b"{")
            time.sleep(1)

    caller = threading.Thread(target=call)
    late = threading.Timer(0.8, lambda: outcomes.update(meet_all([1], of=2, port=port, **when)))
    when = {"timeout_s": 30}
    outcomes: dict[int, object] = {}
    threading.Timer(0.2, caller.start).start()
    late.start()
    outcomes |= meet_all([0], of=2, port=port, **when)
    late.join()
    caller.join()
    assert isinstance(outcomes[1], int)
    for each in crowd:
        each.close()


def test_only_the_named_address_listens():
    port = free_port()
    found: list[OSError | None] = []

    def knock() -> None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            found.append(None)
        except OSError as error:
            found.append(error)

    timer = threading.Timer(0.5, knock)
    timer.start()
    late = threading.Timer(1.0, lambda: meet_all([1], of=2, port=port, **at))
    at = {"timeout_s": 20, "host": "127.0.0.2"}
    late.start()
    assert isinstance(meet_all([0], of=2, port=port, **at)[0], int)
    late.join()
    timer.join()
    assert isinstance(found[0], ConnectionRefusedError)


def test_strangers_at_the_port_change_nothing():
    port = free_port()

    def knock() -> None:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"greeting": "other"}\n', b""):
            time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(data)

    thread = threading.Timer(0.2, knock)
    thread.start()
    begun = threading.Timer(1.0, lambda: later.update(meet_all([1], of=2, port=port, timeout_s=20)))
    later: dict[int, object] = {}
    begun.start()
    outcomes = meet_all([0], of=2, port=port, timeout_s=20)
    thread.join()
    begun.join()
    assert isinstance(outcomes[0], int)
    assert later == {1: outcomes[0]}
