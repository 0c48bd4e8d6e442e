"""Processes that meet before JAX starts: who came, who did not, and strangers."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

from jaxinfra.errors import LostPeerError
from jaxinfra.runtime.cluster import Cluster, free_port
from jaxinfra.runtime.rendezvous import PortTakenError, wait_for_processes


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
            outcomes[process] = wait_for_processes(cluster, timeout_s=timeout_s)
        except Exception as error:
            outcomes[process] = error

    threads = [threading.Thread(target=come, args=(process,)) for process in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 30)
    return outcomes


def called(port: int, *, host: str = "127.0.0.1") -> socket.socket:
    """A connection to whoever listens there, once somebody does."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def meet_after(
    first: Callable[[], None], late: list[int], *, of: int, port: int, **when
) -> dict[int, object]:
    """Process 0 comes, then something happens there, then the others come."""
    outcomes: dict[int, object] = {}

    def happen() -> None:
        first()
        outcomes.update(meet_all(late, of=of, port=port, **when))

    thread = threading.Thread(target=happen)
    thread.start()
    host = meet_all([0], of=of, port=port, **when)
    thread.join()
    return host | outcomes


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
        outcomes = meet_all([0], of=2, port=port, timeout_s=120)
    assert isinstance(outcomes[0], PortTakenError)
    assert str(port) in str(outcomes[0])
    assert time.monotonic() - began < 60


def hello(token: str) -> bytes:
    said = {"greeting": "jaxinfra rendezvous 2", "process": 1, "of": 3, "token": token}
    return json.dumps(said).encode() + b"\n"


def test_who_does_not_know_the_token_gets_no_place_and_no_answer():
    port = free_port()
    answers: list[bytes] = []

    def pretend() -> None:
        for token in ("", "a guess", "a secret ", "\ud800"):
            with called(port) as stranger:
                stranger.sendall(hello(token))
                stranger.settimeout(60)
                answers.append(stranger.recv(100))

    outcomes = meet_after(pretend, [1, 2], of=3, port=port, timeout_s=60)
    assert answers == [b""] * 4
    assert len(outcomes) == 3
    assert len({*outcomes.values()}) == 1, outcomes


def test_callers_that_say_nothing_keep_nobody_waiting():
    port = free_port()
    silent: list[socket.socket] = []

    def call() -> None:
        silent.extend(called(port) for _ in range(20))

    began = time.monotonic()
    outcomes = meet_after(call, [1], of=2, port=port, timeout_s=120)
    assert time.monotonic() - began < 60, "each is waited for 5 s"
    assert isinstance(outcomes[1], int)
    for each in silent:
        each.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_crowd_that_says_little_is_sent_away():
    """More than are heard at a time, each a byte a second: whoever belongs here gets in."""
    port, crowd = free_port(), []
    there, met = threading.Event(), threading.Event()

    def call() -> None:
        crowd.extend(called(port) for _ in range(90))
        there.set()
        for _ in range(8):
            for each in crowd:
                with contextlib.suppress(OSError):
                    each.send(b"{")
            if met.wait(1):
                return

    caller = threading.Thread(target=call)
    caller.start()
    outcomes = meet_after(lambda: assert_set(there), [1], of=2, port=port, timeout_s=60)
    met.set()
    caller.join()
    assert isinstance(outcomes[1], int)
    for each in crowd:
        each.close()


def test_only_the_named_address_listens():
    port = free_port()
    found: list[OSError | None] = []

    def knock() -> None:
        called(port, host="127.0.0.2").close()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            found.append(None)
        except OSError as error:
            found.append(error)

    outcomes = meet_after(knock, [1], of=2, port=port, timeout_s=60, host="127.0.0.2")
    assert isinstance(outcomes[0], int)
    assert isinstance(found[0], ConnectionRefusedError)


def test_strangers_at_the_port_change_nothing():
    port = free_port()

    def knock() -> None:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"greeting": "other"}\n', b""):
            with called(port) as stranger:
                stranger.sendall(data)

    outcomes = meet_after(knock, [1], of=2, port=port, timeout_s=60)
    assert isinstance(outcomes[0], int)
    assert outcomes[1] == outcomes[0]
