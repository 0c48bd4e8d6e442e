"""Runs an engine over several processes: the first one schedules, and all run its programs.

Before the first process runs a program, it sends the program's key and its small arguments to the
others. Weights, pages and all other large arrays stay sharded over the mesh.
"""

import contextlib
import multiprocessing
import queue
import secrets
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, final

import numpy as np
from jax.experimental import multihost_utils

from jaxinfra.errors import LostPeerError
from jaxinfra.runtime.cluster import Cluster
from jaxinfra.runtime.rendezvous import bind_address
from jaxinfra.serving.engine.program_set import ProgramKey
from jaxinfra.serving.engine.runner import ModelRunner

_KEY_BYTES = 16
_PORT_BYTES = 2
_NOTICE_S = 2.0  # within which the end of a process is seen


@final
class Followers:
    """Connections from the first process to the other processes of its job.

    Args:
        lost: called from a thread when another process is gone; a running program may then never
            end.
    """

    def __init__(self, cluster: Cluster, *, lost: Callable[[LostPeerError], None]):
        key = secrets.token_bytes(_KEY_BYTES)
        self._lost, self._is_over = lost, False
        self._loss: queue.Queue[LostPeerError] = queue.Queue()
        self._count = cluster.num_processes
        self._connections: list[Connection] = []
        with Listener((bind_address(cluster) or "", 0), authkey=key) as listener:
            _agree(int(listener.address[1]).to_bytes(_PORT_BYTES) + key)
            while len(self._connections) < self._count - 1:
                # Others than those that were told the key are turned away.
                with contextlib.suppress(multiprocessing.AuthenticationError, OSError):
                    self._connections.append(listener.accept())
        for connection in self._connections:
            threading.Thread(target=self._watch, args=(connection,), daemon=True).start()

    def send(self, key: ProgramKey, arguments: tuple[Any, ...]) -> None:
        """Makes all other processes run a program with these arguments."""
        with contextlib.suppress(OSError):  # who is gone is noticed by its thread
            for connection in self._connections:
                connection.send((key, arguments))

    def loss(self) -> LostPeerError | None:
        """Returns the error that names the lost process, or None. A failed collective may be
        noticed before the loss, so this waits for it briefly.
        """
        try:
            return self._loss.get(timeout=_NOTICE_S)
        except queue.Empty:
            return None

    def end(self) -> None:
        """Tells all other processes that no program follows."""
        self._is_over = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)

    def _watch(self, connection: Connection) -> None:
        number = 0
        with contextlib.suppress(EOFError, OSError):
            number = int.from_bytes(connection.recv_bytes(_PORT_BYTES))
            connection.recv_bytes()  # it says nothing more
        if not self._is_over:
            loss = LostPeerError(
                f"process {number} of {self._count} is gone, and with it a part of the model; "
                "start all of them again"
            )
            self._loss.put(loss)
            self._lost(loss)


def follow(cluster: Cluster, runner: ModelRunner) -> None:
    """Runs the programs that the first process sends, until it sends the end.

    Raises:
        LostPeerError: the first process is gone.
    """
    agreed = _agree(bytes(_PORT_BYTES + _KEY_BYTES))
    port, key = int.from_bytes(agreed[:_PORT_BYTES]), agreed[_PORT_BYTES:]
    try:
        with Client((cluster.host, port), authkey=key) as connection:
            connection.send_bytes(cluster.process_id.to_bytes(_PORT_BYTES))
            while (told := connection.recv()) is not None:
                program, arguments = told
                runner.call(program, *arguments)
    except (EOFError, OSError) as error:
        raise LostPeerError(
            "process 0, which decides what is run, is gone; start all of them again"
        ) from error


def _agree(said: bytes) -> bytes:
    """Broadcasts bytes from the first process, and returns them in all processes."""
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(said, np.uint8))
    return np.asarray(told).astype(np.uint8).tobytes()
