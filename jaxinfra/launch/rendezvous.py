"""All processes say who they are before any of them starts JAX.

JAX's own start waits without naming whom for; a process that is missing, or a port that somebody
else has, shows here in bounded time and by name. Each process sends one line of JSON to process 0,
which answers all of them alike once everyone has come or time is up.
"""

import contextlib
import errno
import json
import socket
import time
from typing import Any

from jaxinfra.core.errors import JaxinfraError, LostPeerError
from jaxinfra.launch.cluster import Cluster

TIMEOUT_S = 50.0
_GREETING = "jaxinfra rendezvous 1"
_RETRY_S = 0.2


class PortTakenError(JaxinfraError):
    """Process 0 cannot listen where the others look for it."""


def meet(cluster: Cluster, *, timeout_s: float = TIMEOUT_S) -> int:
    """Waits until every process has come; returns the port on which JAX's service is to listen.

    Raises:
        PortTakenError: the port is in use on process 0's host, or not by us.
        LostPeerError: names those that did not come within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    if cluster.process_id == 0:
        answer = _host(cluster, deadline, timeout_s)
    else:
        answer = _visit(cluster, deadline, timeout_s)
    if "error" in answer:
        raise LostPeerError(answer["error"])
    return int(answer["port"])


def _host(cluster: Cluster, deadline: float, timeout_s: float) -> dict[str, Any]:
    # Process 0 of one node is found through the loopback, of several through any interface.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((bind_address(cluster), cluster.port))
            server.listen(4096)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise PortTakenError(
                    f"process 0 cannot listen on port {cluster.port} of {cluster.host}: "
                    f"{error.strerror}; free it, or choose another with --port or JAXINFRA_PORT"
                ) from error
            raise
        here: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as connections:
            while len(here) < cluster.num_processes - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                server.settimeout(left)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    break
                connections.enter_context(connection)
                # One that says nothing must not keep the others waiting.
                connection.settimeout(min(5.0, max(left, 0.1)))
                process = _greeted_by(connection, cluster)
                if process is not None:
                    here[process] = connection
            absent = sorted(set(range(1, cluster.num_processes)) - here.keys())
            answer: dict[str, Any] = {"greeting": _GREETING, "port": _free_port(cluster)}
            if absent:
                answer["error"] = (
                    f"{_numbers(absent)} of {cluster.num_processes} did not come to "
                    f"{cluster.coordinator} within {timeout_s:g} s; start all of them, and see "
                    "their logs for why they could not"
                )
            for connection in here.values():
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _greeted_by(connection: socket.socket, cluster: Cluster) -> int | None:
    """The number of the process that called; None for a stranger, who is not answered."""
    try:
        said = json.loads(_line(connection))
        valid = said["greeting"] == _GREETING and said["of"] == cluster.num_processes
        process = int(said["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if valid and 0 < process < cluster.num_processes else None


def _visit(cluster: Cluster, deadline: float, timeout_s: float) -> dict[str, Any]:
    hello = {"greeting": _GREETING, "process": cluster.process_id, "of": cluster.num_processes}
    trouble = "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=left) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0's clock started at another time: it answers when it gives up.
                connection.settimeout(left + 5.0)
                answer = json.loads(_line(connection))
                if answer["greeting"] == _GREETING:
                    return answer
                trouble = "another program listens there"
        except (ValueError, KeyError, TypeError):
            trouble = "what listens there is not process 0 of this job"
        except OSError as error:
            trouble = error.strerror or str(error)
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise LostPeerError(
        f"process {cluster.process_id} did not reach process 0 at {cluster.coordinator} within "
        f"{timeout_s:g} s: {trouble}; process 0 is absent, or cannot be reached from here"
    )


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(4096)
        if not piece or len(data) > 1 << 16:
            raise ValueError("no line")
        data += piece
    return data


def bind_address(cluster: Cluster) -> str:
    """Loopback only, where process 0 is to be found on the loopback."""
    return cluster.host if cluster.host in ("127.0.0.1", "localhost") else ""


def _free_port(cluster: Cluster) -> int:
    # Another than ours: it may not be bound again while our own connections linger.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((bind_address(cluster), 0))
        return probe.getsockname()[1]


def _numbers(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
