"""Bandwidth between the host and its GPUs and between GPUs, beside what the links should give."""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxinfra.diagnostics.machine.finding import Finding, judged
from jaxinfra.diagnostics.machine.nvml import Answers, asked_or_none
from jaxinfra.runtime.devices import device_peak

_BYTES = 256 << 20
_ROUNDS = 5
_SHARE = 0.6
"""Share of a link's published rate that one copy should reach."""
# Bytes/s of one PCIe lane and direction, by generation, after encoding.
_LANE = {3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}


class LinkRate(NamedTuple):
    """One measured way."""

    sender: str
    receiver: str
    bytes_per_s: float
    expected: float | None  # None where the topology does not say


def measure_links(answers: Answers, devices: Sequence[jax.Device]) -> list[LinkRate]:
    """Host to every GPU, and every GPU to every other, by the median of copies of 256 MiB."""
    host = np.zeros(_BYTES, np.uint8)
    found = []
    for device in devices:
        lanes = asked_or_none(answers, "nvmlDeviceGetMaxPcieLinkWidth", device.id)
        generation = asked_or_none(answers, "nvmlDeviceGetMaxPcieLinkGeneration", device.id)
        best = lanes * _LANE[generation] if lanes and generation in _LANE else None
        found.append(LinkRate("host", f"gpu {device.id}", _rate(host, device), best))
    for sender in devices:
        array = jax.device_put(host, sender)
        peak = device_peak(sender.device_kind)
        for receiver in devices:
            if receiver != sender:
                expected = None if peak is None else peak.link_bytes_per_s
                names = f"gpu {sender.id}", f"gpu {receiver.id}"
                found.append(LinkRate(*names, _rate(array, receiver), expected))
    return found


def _rate(array: np.ndarray | jax.Array, device: jax.Device) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        jax.device_put(array, device).block_until_ready()
        times.append(time.perf_counter() - began)
    return array.nbytes / statistics.median(times[1:])  # the first allocates


def link_findings(rates: Iterable[LinkRate]) -> list[Finding]:
    """Every way, against its link's rate and against the others of its kind."""
    rates = list(rates)
    found = []
    for rate in rates:
        # Pageable memory of the host is copied twice: such ways are held to their like alone.
        own = None if rate.sender == "host" else rate.expected
        alike = [other.bytes_per_s for other in rates if (other.sender == "host") == (own is None)]
        usual = statistics.median(alike)
        ok = rate.bytes_per_s >= 0.5 * usual and (own is None or rate.bytes_per_s >= _SHARE * own)
        beside = "" if rate.expected is None else f" of {rate.expected / 1e9:.0f}"
        found.append(
            judged(
                f"link: {rate.sender} to {rate.receiver}",
                f"{rate.bytes_per_s / 1e9:.1f}{beside} GB/s",
                ok=ok,
                rule=f"{_SHARE:.0%} of NVLink's rate, and half of what the others reach",
                remedy="look at the links' errors above; restart the node; check its topology "
                "(nvidia-smi topo -m)",
            )
        )
    return found
