"""Constants that ``jaxinfra bench`` measured on the user's own GPUs, in place of ours."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from jaxinfra.planning.devices import Device, with_measurements
from jaxinfra.runtime.files import is_of_type, read_json

_LARGEST_BYTES = 2**28  # of a training step's collectives; larger ones run somewhat faster


def with_bench_results(device: Device, directory: Path) -> Device:
    """The device by the results in a directory, newer over older; as it was where none are its own.

    Read are those of ``bench constants`` and ``bench collectives`` whose device is of this kind;
    each constant's source then names the file.

    Raises:
        ConfigError: a file is no JSON, or holds a constant of another name.
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
    """What a benchmark's result says of this device's cost model; empty where nothing."""
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
