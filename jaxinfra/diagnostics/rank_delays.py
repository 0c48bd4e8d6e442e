"""A device that the others wait for, from traces of several devices side by side."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from jaxinfra.diagnostics.delay import Delay
from jaxinfra.diagnostics.waterfall import IDLE, Waterfall

_SHARE = 0.04
"""Share of a step that a device is behind at least to count."""
_ALIKE = 0.5
"""Share of what a device is behind that its kernels, or its idle time, make up to be its reason."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Milliseconds per step of one device."""

    name: str
    computing_ms: float  # copies too
    idle_ms: float
    waiting_ms: float  # communication that nothing hides: for the others, or for the wire

    @property
    def own_ms(self) -> float:
        """Until it can meet the others."""
        return self.computing_ms + self.idle_ms


def device_times(ranks: Mapping[str, Waterfall]) -> list[DeviceTime]:
    """Where the step of each device went."""
    found = []
    for name, waterfall in ranks.items():
        by_kind = waterfall.by_kind()
        idle, waiting = by_kind.get(IDLE, 0.0), by_kind.get("collective", 0.0)
        found.append(
            DeviceTime(
                name=name,
                computing_ms=sum(by_kind.values()) - idle - waiting,
                idle_ms=idle,
                waiting_ms=waiting,
            )
        )
    return found


def straggler_delays(ranks: Mapping[str, Waterfall]) -> list[Delay]:
    """The device whose own work takes longer than the others', which wait for it in a collective.

    Devices of different pipeline stages do different work; those are not to be compared.
    """
    times = device_times(ranks)
    if len(times) < 2:
        return []
    slowest = max(times, key=lambda each: each.own_ms)
    others = [each for each in times if each is not slowest]
    behind = slowest.own_ms - statistics.median(each.own_ms for each in others)
    step_ms = max(waterfall.span_ms for waterfall in ranks.values())
    # Whoever is behind waits for nobody, and all others wait for it.
    waited = min(each.waiting_ms for each in others) - slowest.waiting_ms
    won = min(behind, waited)
    if won < _SHARE * step_ms:
        return []
    computing = statistics.median(each.computing_ms for each in others)
    more = slowest.computing_ms - computing
    if more > _ALIKE * behind:
        text = f"its kernels take {slowest.computing_ms:.1f} ms, the others' {computing:.1f}"
        remedy = "look at its clocks, power limit and heat (jaxinfra doctor on its host)"
    else:
        idle = statistics.median(each.idle_ms for each in others)
        text = f"it has nothing to do for {slowest.idle_ms:.1f} ms, the others for {idle:.1f}"
        remedy = "look at what else runs on its host's cores"
    return [Delay(cause=f"{slowest.name}, which is slow", ms=won, text=text, remedy=remedy)]


def without_waiting(
    delays: Sequence[Delay], stragglers: Sequence[Delay], *, least_ms: float
) -> list[Delay]:
    """A device's delays without what it waits for slow ones: communication takes that less.

    Args:
        least_ms: under which what is left is not worth a line.
    """
    waits = sum(each.ms for each in stragglers)
    found = []
    for each in sorted(delays, key=lambda each: -each.ms):
        if waits and each.cause.startswith("communication over"):
            taken = min(waits, each.ms)
            waits -= taken
            if each.ms - taken < least_ms:
                continue
            found.append(dataclasses.replace(each, ms=each.ms - taken))
        else:
            found.append(each)
    return found
