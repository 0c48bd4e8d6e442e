"""Synchronization of a run's processes. With one process its functions are trivial."""

import pickle
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxinfra.errors import CheckpointError

# A process that died is noticed by JAX's heartbeat long before; this bounds a slow disk.
_BARRIER_TIMEOUT_S = 1800


def on_first[T](work: Callable[[], T]) -> T:
    """Runs ``work`` on process 0 alone; every process returns its value or raises its error.

    A collective: all processes call it, in the same order, from their main threads.
    """
    if jax.process_count() == 1:
        return work()
    failure, outcome = None, {}
    if jax.process_index() == 0:
        try:
            outcome = {"value": work()}
        except Exception as error:  # the others wait for an answer, whatever happened here
            failure, outcome = error, {"error": f"process 0: {error}"}
    data = np.frombuffer(pickle.dumps(outcome), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    outcome = pickle.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
    if failure is not None:
        raise failure
    if "error" in outcome:
        raise CheckpointError(outcome["error"])
    return outcome["value"]


def barrier(name: str) -> None:
    """Waits for all processes. It may be called in any thread and uses no devices; each ``name``
    may be used only once.
    """
    import orbax.checkpoint as ocp  # it takes its time, and one process needs no barrier

    ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=_BARRIER_TIMEOUT_S * 1000)
