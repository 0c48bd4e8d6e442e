"""A small table that all processes of a job see alike: one row each, once a step.

An all-gather of a few floats per process is dispatched beside the step and read with its metrics,
so no host waits for it. Whatever is decided from a table is decided by all alike: when to stop,
who is slow.
"""

import dataclasses
from typing import final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRow:
    """What a process tells the others."""

    stop: float = 0.0  # number of the signal that asks it to stop; 0: none
    input_s: float = 0.0  # waited for the batch of the step before
    host_s: float = 0.0  # between that batch's arrival and the step's dispatch
    probe_s: float = 0.0  # a small program that only its own devices run; 0: not measured
    rows_sum: float = 0.0  # of the rows it has read (jaxinfra.data.ledger); below 2^24


_NAMES = tuple(field.name for field in dataclasses.fields(ProcessRow))


@final
class ProcessTable:
    """A dispatched exchange; ``rows`` waits for it."""

    def __init__(self, gathered: jax.Array, num_processes: int):
        self._gathered = gathered
        self._num_processes = num_processes

    def rows(self) -> list[ProcessRow]:
        """One row per process, in their order."""
        values = np.asarray(self._gathered.addressable_data(0))
        values = values.reshape(self._num_processes, -1, len(_NAMES))[:, 0]
        return [ProcessRow(**dict(zip(_NAMES, map(float, row), strict=True))) for row in values]


@final
class Exchange:
    """A collective: every process calls ``start`` at the same points, in the same order."""

    def __init__(self) -> None:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(devices), ("ranks",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("ranks"))
        whole = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda x: x, out_shardings=whole)

    def start(self, row: ProcessRow) -> ProcessTable:
        """Sends this process's row; returns at once."""
        local = np.array([[getattr(row, name) for name in _NAMES]], np.float32)
        local = np.repeat(local, jax.local_device_count(), axis=0)
        sent = jax.make_array_from_process_local_data(self._sharding, local)
        return ProcessTable(self._gather(sent), jax.process_count())
