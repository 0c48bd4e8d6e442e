"""The rendezvous: a job's processes meet before JAX starts, join it, and leave it at the end.

JAX's own start does not name the process that it waits for. Here a missing process or a taken port
is reported by name within bounded time. Each process sends one line of JSON to process 0, which
sends one answer to all when everyone has come or time is up.
"""

import contextlib
import errno
import hmac
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import jax

from jaxinfra.errors import ConfigError, JaxinfraError, LostPeerError
from jaxinfra.runtime.cluster import BIND, PORT, TOKEN, Cluster, detect_cluster, free_port
from jaxinfra.runtime.files import parse_json

_log = logging.getLogger(__name__)

TIMEOUT_S = 50.0
_GREETING = "jaxinfra rendezvous 2"
_RETRY_S = 0.2
_GREETING_S = 5.0
_STRANGERS = 64  # that are heard at a time


class PortTakenError(JaxinfraError):
    """Error of process 0: it cannot listen on the coordinator's port."""


def wait_for_processes(cluster: Cluster, *, timeout_s: float = TIMEOUT_S) -> int:
    """Waits until every process of the job has come; returns the port for JAX's service.

    Raises:
        PortTakenError: another program uses the port on process 0's host.
        LostPeerError: some processes did not come within ``timeout_s``; the message names them.
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
    if not cluster.token and not _is_loopback(cluster.host):
        _log.warning(
            "no %s is set: whoever reaches %s can join this job, or take a place in it; give all "
            "of its processes one random token",
            TOKEN,
            cluster.coordinator,
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = bind_address(cluster)
        try:
            server.bind((address, cluster.port))
            server.listen(4096)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise PortTakenError(
                    f"process 0 cannot listen on port {cluster.port} of {address or 'any address'} "
                    f"({cluster.host}): {error.strerror}; free it or choose another with --port or "
                    f"{PORT}, or name an address of this machine with {BIND}"
                ) from error
            raise
        here: dict[int, socket.socket] = {}
        greeted: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
        with contextlib.ExitStack() as connections:
            accepting = threading.Thread(
                target=_accept, args=(server, cluster, deadline, greeted), daemon=True
            )
            accepting.start()
            while len(here) < cluster.num_processes - 1:
                try:
                    left = max(0.0, deadline - time.monotonic())
                    process, connection = greeted.get(timeout=left)
                except queue.Empty:
                    break
                here[process] = connections.enter_context(connection)
            absent = sorted(set(range(1, cluster.num_processes)) - here.keys())
            # Another port than ours: it may not be bound again while our own connections linger.
            answer: dict[str, Any] = {
                "greeting": _GREETING,
                "port": free_port(bind_address(cluster)),
            }
            if absent:
                answer["error"] = (
                    f"{_numbers(absent)} of {cluster.num_processes} did not come to "
                    f"{cluster.coordinator} within {timeout_s:g} s; start all of them, and see "
                    "their logs for why they could not"
                )
            for connection in here.values():
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
    return answer


def _accept(server: socket.socket, cluster: Cluster, deadline: float, greeted: queue.Queue) -> None:
    """Greets each caller in a thread of its own, so that a silent one delays no other."""

    places = threading.Semaphore(cluster.num_processes + _STRANGERS)

    def greet(connection: socket.socket, address: tuple[str, int]) -> None:
        try:
            process = _greeted_by(connection, cluster)
        finally:
            places.release()
        if process is None:
            connection.close()
            _log.warning("a stranger called from %s and was refused", address[0])
        else:
            greeted.put((process, connection))

    while (left := deadline - time.monotonic()) > 0:
        try:
            server.settimeout(left)
            connection, address = server.accept()
        except OSError:  # time is up, or everyone has come and the socket is closed
            return
        if not places.acquire(blocking=False):  # a crowd: who belongs here calls again
            connection.close()
            continue
        threading.Thread(target=greet, args=(connection, address), daemon=True).start()


def _greeted_by(connection: socket.socket, cluster: Cluster) -> int | None:
    """The number of the process that called; None for a stranger, who is not answered."""
    try:
        said = parse_json(_line(connection, within_s=_GREETING_S), where="a greeting", holds=_Hello)
        # All of it in a time that does not tell how much was right.
        same = hmac.compare_digest(said["token"].encode(), cluster.token.encode())
    except (OSError, ValueError, ConfigError):
        return None
    valid = said["greeting"] == _GREETING and said["of"] == cluster.num_processes
    return said["process"] if same and valid and 0 < said["process"] < said["of"] else None


class _Hello(TypedDict):
    greeting: str
    process: int
    of: int
    token: str


class _Answer(TypedDict):
    greeting: str
    port: int
    error: NotRequired[str]


def _visit(cluster: Cluster, deadline: float, timeout_s: float) -> dict[str, Any]:
    hello = _Hello(
        greeting=_GREETING,
        process=cluster.process_id,
        of=cluster.num_processes,
        token=cluster.token,
    )
    trouble = "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=left) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0's clock started at another time: it answers when it gives up.
                line = _line(connection, within_s=left + _GREETING_S)
                answer = parse_json(line, where="an answer", holds=_Answer)
                if answer["greeting"] == _GREETING:
                    return answer
                trouble = "another program listens there"
        except (ValueError, ConfigError):
            trouble = "what listens there is not process 0 of this job, or has another token"
        except OSError as error:
            trouble = error.strerror or str(error)
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise LostPeerError(
        f"process {cluster.process_id} did not reach process 0 at {cluster.coordinator} within "
        f"{timeout_s:g} s: {trouble}; process 0 is absent, or cannot be reached from here"
    )


def _line(connection: socket.socket, *, within_s: float) -> bytes:
    """A line, all of which comes in time; raises OSError or ValueError."""
    data, deadline = b"", time.monotonic() + within_s
    while not data.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(4096)
        if not piece or len(data) > 1 << 16:
            raise ValueError("no line")
        data += piece
    return data


def bind_address(cluster: Cluster) -> str:
    """Returns the address that process 0 listens on: only the one at which others find it.

    It is empty, for all addresses, if this machine's name resolves to its loopback only, as on some
    systems: other machines could not connect to that.
    """
    if cluster.bind is not None:
        return "" if cluster.bind == "0.0.0.0" else cluster.bind
    if cluster.host == "localhost":
        return cluster.host
    try:
        address = socket.gethostbyname(cluster.host)
    except OSError as error:
        raise LostPeerError(
            f"process 0 is to be found at {cluster.host}, which has no address here "
            f"({error.strerror}); name one with {BIND}"
        ) from error
    if _is_loopback(address) and not _is_loopback(cluster.host):
        _log.warning(
            "%s is %s here: process 0 listens on all addresses; name one with %s",
            cluster.host,
            address,
            BIND,
        )
        return ""
    return address


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _numbers(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


# Our own watchdogs name who is gone within seconds; JAX's, which aborts without naming anybody, is
# for what they do not see.
_HEARTBEAT_S = 100
_START_S = 60
_SHUTDOWN_S = 60


def connect(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """Joins the job that the environment describes; returns None if this process is the whole job.

    Call it before anything asks JAX for devices.

    Raises:
        ConfigError: the environment is incomplete.
        PortTakenError, LostPeerError: the rendezvous failed; see ``wait_for_processes``.
    """
    cluster = detect_cluster(os.environ if environment is None else environment)
    if cluster is None or jax.distributed.is_initialized():
        return cluster
    port = wait_for_processes(cluster)
    # Otherwise JAX takes SIGTERM for itself, and the run is not told of it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            f"{cluster.host}:{port}",
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=_own_devices(cluster),
            cluster_detection_method="deactivate",
            initialization_timeout=_START_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
            coordinator_bind_address=f"{bind_address(cluster) or '[::]'}:{port}",
        )
    except jax.errors.JaxRuntimeError as error:
        raise LostPeerError(
            f"process {cluster.process_id} of {cluster.num_processes} met the others at "
            f"{cluster.coordinator}, and then JAX could not connect them: {error}"
        ) from error
    return cluster


def _own_devices(cluster: Cluster) -> list[int] | None:
    """One GPU each where a node has several processes; all of them where it has one."""
    if cluster.num_local < 2 or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < cluster.num_local:
        return None  # whoever started this process has chosen its devices
    return [cluster.local_id]


def end_process(code: int, *, together: bool, wait: bool = True) -> int:
    """Ends this process's part in the job; returns ``code``, or exits the process with it.

    Args:
        together: all processes end here now. If not, the process ends at once, as waiting for
            others that are stuck or gone would hang.
        wait: wait for this process's own threads, as Python does at its exit.
    """
    connected = jax.distributed.is_initialized()
    if connected and together:
        jax.distributed.shutdown()
    if not wait or (connected and not together):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
