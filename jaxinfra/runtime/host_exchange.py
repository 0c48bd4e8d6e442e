"""An exchange of one row of numbers per process and step, and detection of slow ranks from it.

An all-gather of a few floats per process is dispatched with each step and read with its metrics,
so no host waits. All processes decide from the same table when to stop and which ranks are slow.

Whole steps take equally long on all ranks, as collectives wait for the slowest. So each rank sends
times that it spent alone: waiting for its batch, dispatching the step, and at times a small program
on its own devices.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from typing import final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRow:
    """One process's row of the table: stop flag, its own seconds, and its batch rows' checksum."""

    stop: float = 0.0  # number of the signal that asks it to stop; 0: none
    input_s: float = 0.0  # waited for the batch of the step before
    host_s: float = 0.0  # between that batch's arrival and the step's dispatch
    probe_s: float = 0.0  # a small program that only its own devices run; 0: not measured
    rows_checksum: float = 0.0  # of the rows it has read (jaxinfra.data.batch); below 2^24


_NAMES = tuple(field.name for field in dataclasses.fields(ProcessRow))


@final
class ProcessTable:
    """An all-gather of one row per process that has been dispatched; ``rows`` waits for it."""

    def __init__(self, gathered: jax.Array, num_processes: int):
        self._gathered = gathered
        self._num_processes = num_processes

    def rows(self) -> list[ProcessRow]:
        """Waits for the all-gather and returns one row per process, in process order."""
        values = np.asarray(self._gathered.addressable_data(0))
        values = values.reshape(self._num_processes, -1, len(_NAMES))[:, 0]
        return [ProcessRow(**dict(zip(_NAMES, map(float, row), strict=True))) for row in values]


@final
class RowAllGather:
    """All-gather of a row per process; all call ``start`` at the same points, in one order."""

    def __init__(self) -> None:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(devices), ("ranks",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("ranks"))
        whole = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda x: x, out_shardings=whole)

    def start(self, row: ProcessRow) -> ProcessTable:
        """Dispatches the all-gather with this process's row; returns at once."""
        local = np.array([[getattr(row, name) for name in _NAMES]], np.float32)
        local = np.repeat(local, jax.local_device_count(), axis=0)
        sent = jax.make_array_from_process_local_data(self._sharding, local)
        return ProcessTable(self._gather(sent), jax.process_count())


# What each time is called in a verdict, and what to look at.
_CAUSES = {
    "input_s": ("input", "its loader or its disk"),
    "host_s": ("host", "its processor, or what else runs there"),
    "probe_s": ("device", "its clocks, temperature and ECC counters"),
}


_PROBES = 4  # of a rank, before they tell anything
_WINDOW = 16  # steps that medians are taken over
_MARGIN_S, _SHARE = 0.05, 0.1  # least excess, in seconds and of the others' median step
_PROBE_SHARE = 0.5  # least excess of a probe, of the others' probe


@final
class Stragglers:
    """Finds slow ranks: those whose median exceeds the others' by a margin, reported once.

    Args:
        probe_margin_s: least excess in seconds of a probe, which takes a device milliseconds.
    """

    def __init__(self, *, probe_margin_s: float = 0.001):
        self._rows: deque[list[ProcessRow]] = deque(maxlen=_WINDOW)
        self._probes: deque[list[ProcessRow]] = deque(maxlen=2 * _PROBES)  # they are rarer
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._probe_margin_s = probe_margin_s
        self._named: set[tuple[int, str]] = set()

    def add(
        self, rows: Sequence[ProcessRow], *, step_s: float | None
    ) -> list[tuple[int, str, str]]:
        """Adds a step's table and time; returns new slow ranks as (rank, cause, sentence)."""
        self._rows.append(list(rows))
        if rows and all(row.probe_s > 0 for row in rows):
            self._probes.append(list(rows))
        if step_s is not None:
            self._steps.append(step_s)
        if len(self._rows) < _WINDOW // 2 or len(rows) < 2 or not self._steps:
            return []
        return [found for name in _CAUSES for found in self._compare(name, len(rows))]

    def _compare(self, name: str, num_ranks: int) -> list[tuple[int, str, str]]:
        is_probe = name == "probe_s"
        tables = self._probes if is_probe else self._rows
        times = [
            [getattr(rows[rank], name) for rows in tables if getattr(rows[rank], name) > 0]
            for rank in range(num_ranks)
        ]
        if not all(times):
            return []
        if is_probe:
            if len(tables) < _PROBES:
                return []
            # Other work on a core makes some probes slow, a slow device makes all of them so.
            medians = [min(values) for values in times]
        else:
            medians = [statistics.median(values) for values in times]
        found = []
        for rank, mine in enumerate(medians):
            others = statistics.median(medians[:rank] + medians[rank + 1 :])
            excess = mine - others
            if is_probe:
                least = max(self._probe_margin_s, _PROBE_SHARE * others)
            else:
                least = max(_MARGIN_S, _SHARE * statistics.median(self._steps))
            if excess <= least:
                self._named.discard((rank, name))
            elif (rank, name) not in self._named:
                self._named.add((rank, name))
                cause, where = _CAUSES[name]
                text = (
                    f"rank {rank} is slow, cause {cause}: {1e3 * mine:.0f} ms where the others "
                    f"take {1e3 * others:.0f} ms (of {len(times[rank])}); look at {where}"
                )
                found.append((rank, cause, text))
        return found
