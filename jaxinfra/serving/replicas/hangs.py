"""Replicas that hang: still there, and answering nothing. They are found, taken out and killed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import final

from jaxinfra.serving.replicas.processes import ReplicaProcess, Replicas
from jaxinfra.serving.replicas.upstream import LostReplicaError, asked

_LOOKS = 3
"""Looks in a row without a sign of life after which a replica hangs. One alone may be missed by
whoever looks, as on a machine that slept."""


class HungReplicaError(LostReplicaError):
    """The replica hangs, and has been taken out."""


@final
class HangWatch:
    """Looks at each replica's ``/health``, and knows which requests a replica has.

    A replica hangs if it does not answer, or if its engine does not come to the end of a step: it
    is found between ``hang_s`` and twice as many seconds after its last sign of life.
    """

    def __init__(self, replicas: Replicas, *, hang_s: float):
        self._replicas = replicas
        self._look_s = hang_s / _LOOKS
        self._lent: dict[int, set[asyncio.Timeout]] = {each.number: set() for each in replicas.all}

    async def run(self) -> None:
        """Looks until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for each in self._replicas.all:
                group.create_task(self._watch(each))

    @contextlib.asynccontextmanager
    async def lent(self, replica: ReplicaProcess) -> AsyncIterator[None]:
        """Within, a replica has one more request.

        Raises:
            HungReplicaError: it was taken out meanwhile. Its end is not waited for, as a process
                within a driver's call may outlive its kill.
        """
        limits = self._lent[replica.number]
        with replica.taken():
            try:
                async with asyncio.timeout(None) as limit:
                    limits.add(limit)
                    try:
                        yield
                    finally:
                        limits.discard(limit)
            except TimeoutError as error:
                raise HungReplicaError from error

    async def _watch(self, replica: ReplicaProcess) -> None:
        loop = asyncio.get_running_loop()
        misses, seen = 0, replica.num_starts
        while True:
            begun = loop.time()
            start, address = replica.num_starts, replica.address
            missed = "" if address is None else await self._missed(address)
            if not missed or start != seen:
                misses = 0
            misses += bool(missed)
            seen = start
            if misses == _LOOKS:
                self._take_out(replica, start, missed)
                misses = 0
            await asyncio.sleep(max(0.0, begun + self._look_s - loop.time()))

    async def _missed(self, address: str) -> str:
        """What a look did not see of a replica's life; empty where it lives."""
        try:
            async with (
                asyncio.timeout(self._look_s),
                asked(address, "GET", "/health", [], b"") as answer,
            ):
                if answer.status != 200:
                    return ""  # it stops, or has too many connections
                stalled_s = json.loads(await answer.whole())["stalled_s"]
        except TimeoutError:
            return f"/health was not answered within {self._look_s:g} s, {_LOOKS} times in a row"
        except LostReplicaError:
            return f"/health ended without an answer, {_LOOKS} times in a row"
        if stalled_s > self._look_s:
            return f"its engine has been at one step for {stalled_s:.1f} s"
        return ""

    def _take_out(self, replica: ReplicaProcess, start: int, why: str) -> None:
        replica.take_out(start, why)
        now = asyncio.get_running_loop().time()
        for limit in self._lent[replica.number]:
            limit.reschedule(now)
