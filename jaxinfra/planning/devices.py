"""Constants of each GPU type and its links, read from ``constants/*.json`` with their sources.

Measurements of the user's own GPUs by ``jaxinfra bench`` take precedence over them.
"""

import dataclasses
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.devices import device_peak
from jaxinfra.runtime.files import is_of_type, read_json, require_type
from jaxinfra.training.recompute.budget import FREE_SHARE

JAX_SHARE = 0.75
"""Share of a GPU's memory that JAX takes where ``XLA_PYTHON_CLIENT_MEM_FRACTION`` is not set."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """One GPU in the cost model. Times are in seconds, sizes in bytes, rates per second.

    Two devices are equal only if they are the same object, so results can be cached by it.
    """

    name: str
    kind: str  # JAX's device_kind
    num_sms: int
    flops: Mapping[str, float]  # dense tensor-core peak by format
    hbm_bytes: int  # to be used: the whole memory, or what --memory allows
    visible_bytes: int  # that CUDA reports in all, of which JAX takes its share
    hbm_bytes_per_s: float
    matmul_efficiency: Mapping[str, float]  # fraction of peak in large matmuls, by format
    matmul_half_depth: float  # contraction depth at which half of that is reached
    memory_efficiency: float  # fraction of peak bandwidth in elementwise kernels
    # Head dim to FLOP/s of causal attention on long sequences: forward, backward.
    attention_flops: Mapping[str, Sequence[float]]
    attention_half_length: float  # sequence length at which half of that is reached
    kernel_s: float  # launch and tail of one kernel
    node_devices: int
    node_bytes_per_s: float  # bus bandwidth per device within a node
    node_latency_s: float
    node_hop_s: float  # one hop of a ring collective
    network_bytes_per_s: float  # bus bandwidth per device between nodes, by its own adapter
    network_latency_s: float
    network_hop_s: float
    overlap: float  # fraction of the data axes' collectives that compute hides in practice
    collective_sms: int  # SMs that a running collective takes from compute
    reserved_bytes: int  # context, NCCL buffers, fragmentation
    dollars_per_hour: float
    sources: Mapping[str, str]

    @property
    def budget_bytes(self) -> float:
        """Bytes that a step's arrays may take: all but the reserve, less what a run keeps free."""
        return (1 - FREE_SHARE) * (self.hbm_bytes - self.reserved_bytes)

    @property
    def limit_bytes(self) -> float:
        """Largest predicted peak that fits: the arrays' budget and the reserve."""
        return self.budget_bytes + self.reserved_bytes

    def memory_fraction(self, array_bytes: float) -> float | None:
        """Returns the memory fraction to set for JAX; None if its default fits ``array_bytes``.

        With this fraction, a run has ``budget_bytes`` for its arrays, besides the reserve.
        """
        whole = max(find_device(self.name).hbm_bytes, self.hbm_bytes)
        if array_bytes <= (1 - FREE_SHARE) * JAX_SHARE * whole:
            return None
        return 100 * (self.hbm_bytes - self.reserved_bytes) // whole / 100

    @property
    def beside(self) -> float:
        """Fraction of full speed at which computation runs while a collective runs too.

        The collective takes ``collective_sms`` SMs from the computation.
        """
        return 1 - self.collective_sms / self.num_sms

    def link(self, members_in_node: int, members: int) -> tuple[float, float]:
        """Returns a collective's bus bandwidth and latency for a group of GPUs.

        Between nodes, the group uses one network adapter per member in a node. So its bandwidth is
        that of these adapters together, or of the links within a node if those are slower.

        Args:
            members_in_node: number of the group's GPUs in each node.
            members: number of GPUs in the group.
        """
        if members <= members_in_node:
            return self.node_bytes_per_s, self.node_latency_s
        network = self.network_bytes_per_s * members_in_node
        return min(network, self.node_bytes_per_s), self.network_latency_s


NAMES = ("a100", "h100", "h200", "b200")


@functools.cache
def find_device(name: str) -> Device:
    """Returns the GPU type of this name; raises ConfigError with the known names otherwise."""
    if name not in NAMES:
        raise ConfigError(f"unknown device {name!r}{nearest(name, NAMES)}")
    text = (resources.files("jaxinfra.planning") / "constants" / f"{name}.json").read_text()
    values = json.loads(text)
    peak = device_peak(values["kind"])
    assert peak is not None, "every planned device is in runtime/devices.py"
    return Device(
        name=name,
        hbm_bytes=peak.hbm_bytes,
        visible_bytes=peak.visible_bytes,
        hbm_bytes_per_s=peak.hbm_bytes_per_s,
        **values,
    )


def with_measurements(device: Device, measured: Mapping[str, Any], *, source: str) -> Device:
    """Returns the device with the user's benchmarked constants in place of the built-in ones."""
    known = {field.name for field in dataclasses.fields(Device)} - {"sources", "name"}
    unknown = sorted(set(measured) - known)
    if unknown:
        raise ConfigError(f"{source}: unknown constant {unknown[0]!r}{nearest(unknown[0], known)}")
    for name, value in measured.items():
        ours = getattr(device, name)
        has_pairs = isinstance(ours, Mapping) and list in map(type, ours.values())
        table = dict[str, list[float]] if has_pairs else dict[str, float]
        holds = {str: str, int: float, float: float}.get(type(ours), table)
        require_type(value, holds, where=f"{source}, {name}", error=ConfigError)
    sources = {**device.sources, **dict.fromkeys(measured, source)}
    changes: dict[str, Any] = {
        # Tables keep entries that were not measured.
        name: {**ours, **value} if isinstance(ours := getattr(device, name), Mapping) else value
        for name, value in measured.items()
    }
    return dataclasses.replace(device, **changes, sources=sources)


_LARGEST_BYTES = 2**28  # of a training step's collectives; larger ones run somewhat faster


def with_bench_results(device: Device, directory: Path) -> Device:
    """Returns the device with the constants that benchmark files in a directory measured.

    Only files of ``bench constants`` and ``bench collectives`` for this kind of device are read. A
    newer file overrides an older one, and each constant's source names its file.

    Raises:
        ConfigError: a file is not JSON, or has a constant of an unknown name.
    """
    for file in sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime):
        values = read_json(file, holds=Any, remedy="remove it, or choose others with --bench DIR")
        measured = constants_of(values, device)
        if measured:
            device = with_measurements(device, measured, source=str(file))
    return device


class _Environment(TypedDict):
    device: str


class _Result(TypedDict):
    environment: _Environment
    constants: NotRequired[dict[str, Any]]


class _Collective(TypedDict):
    collective: str
    implementation: str
    size_bytes: int
    inside_us: float


class _Collectives(TypedDict):
    environment: _Environment
    num_processes: int
    num_devices: int
    rows: list[_Collective]


def constants_of(values: Any, device: Device) -> dict[str, Any]:
    """Reads the device's cost-model constants from a benchmark's result; may return none."""
    if not is_of_type(values, _Result) or values["environment"]["device"] != device.kind:
        return {}
    if "constants" in values:
        return dict(values["constants"])
    # Started on one process: all of its GPUs share a node.
    is_read = is_of_type(values, _Collectives) and values["num_processes"] == 1
    return _links(values, device) if is_read else {}


def _links(values: Mapping[str, Any], device: Device) -> dict[str, float]:
    """Bus bandwidth by what more bytes take, latency by what is left of the smallest size."""
    members = values["num_devices"]
    share = (members - 1) / members
    rates, latencies = [], []
    for kind, factor in (
        ("all_gather", share),
        ("reduce_scatter", share),
        ("all_reduce", 2 * share),
    ):
        times = {
            row["size_bytes"]: row["inside_us"] / 1e6
            for row in values["rows"]
            if row["collective"] == kind
            and row["implementation"] == "ours"
            and row["size_bytes"] <= _LARGEST_BYTES
        }
        if len(times) < 2:
            continue
        small, large = min(times), max(times)
        rate = factor * (large - small) / (times[large] - times[small])
        turns = members * device.node_hop_s * (2 if kind == "all_reduce" else 1)
        rates.append(rate)
        latencies.append(max(times[small] - factor * small / rate - turns, 0.0))
    if not rates:
        return {}
    return {
        "node_bytes_per_s": statistics.harmonic_mean(rates),
        "node_latency_s": statistics.fmean(latencies),
    }
