"""Who is slow, from times that each rank took before the collectives of its steps.

After a collective all ranks look equally slow. So each sends what it spent alone: waiting for its
batch, handing the step to its devices, and now and then a small program that only its own devices
run.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import final

from jaxinfra.reliability.exchange import ProcessRow

# What each time is called in a verdict, and what to look at.
_CAUSES = {
    "input_s": ("input", "its loader or its disk"),
    "host_s": ("host", "its processor, or what else runs there"),
    "probe_s": ("device", "its clocks, temperature and ECC counters"),
}


_PROBES = 4  # a rank, at least
_PROBE_MARGIN_S = 0.001


@final
class Stragglers:
    """Names a rank once, when its median over the window exceeds the other ranks' by a margin.

    Args:
        window: steps.
        margin_s: the least excess worth naming.
        share: the least excess as a share of the others' median step or probe time.
    """

    def __init__(self, *, window: int = 16, margin_s: float = 0.05, share: float = 0.1):
        self._rows: deque[list[ProcessRow]] = deque(maxlen=window)
        self._steps: deque[float] = deque(maxlen=window)
        self._margin_s, self._share = margin_s, share
        self._named: set[tuple[int, str]] = set()

    def add(
        self, rows: Sequence[ProcessRow], *, step_s: float | None
    ) -> list[tuple[int, str, str]]:
        """A step's table and time; returns newly found (rank, cause, sentence)."""
        self._rows.append(list(rows))
        if step_s is not None:
            self._steps.append(step_s)
        if len(self._rows) < (self._rows.maxlen or 0) // 2 or len(rows) < 2 or not self._steps:
            return []
        return [found for name in _CAUSES for found in self._compare(name, len(rows))]

    def _compare(self, name: str, num_ranks: int) -> list[tuple[int, str, str]]:
        times = [
            [getattr(rows[rank], name) for rows in self._rows if getattr(rows[rank], name) > 0]
            for rank in range(num_ranks)
        ]
        if not all(times):
            return []
        if name == "probe_s":
            if min(map(len, times)) < _PROBES:
                return []
            # Other work on a core makes some probes slow, a slow device makes all of them so.
            medians = [min(values) for values in times]
        else:
            medians = [statistics.median(values) for values in times]
        found = []
        for rank, mine in enumerate(medians):
            others = statistics.median(medians[:rank] + medians[rank + 1 :])
            whole = others if name == "probe_s" else statistics.median(self._steps)
            excess = mine - others
            # A probe takes milliseconds, so that a smaller excess tells.
            margin = _PROBE_MARGIN_S if name == "probe_s" else self._margin_s
            share = 0.5 if name == "probe_s" else self._share
            if excess <= max(margin, share * whole):
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
