"""Seconds of operations on a device: matmuls by shape, memory passes, attention, collectives."""

import functools
import math
from collections.abc import Iterable

from jaxinfra.config.mesh import EXPERT, NODES
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.operations import (
    Core,
    MemoryPass,
    Operation,
    PlannedCollective,
    PlannedMatmul,
)

# Output tiles that libraries choose from, and how much of the large tile's rate each reaches.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 256, 0.9), (64, 128, 0.8))


def matmul_s(device: Device, each: PlannedMatmul) -> float:
    """The slower of arithmetic and memory traffic, and a launch.

    Arithmetic runs at the large-matmul rate, less what a partial last wave of output tiles idles
    and what filling the pipeline over a short contraction costs.
    """
    peak = device.flops[each.number_format] * device.matmul_efficiency[each.number_format]
    depth = each.k / (each.k + device.matmul_half_depth)
    filled = _filled(
        max(int(each.m), 1), max(int(each.n), 1), max(int(each.count), 1), device.num_sms
    )
    # A deep contraction with few output tiles is split over the idle multiprocessors.
    if filled < 0.5 and each.k > 4096:
        filled = max(filled, 0.7)
    arithmetic = 2 * each.m * each.n * each.k * each.count / (peak * depth * max(filled, 1e-3))
    size = {"fp8": 1, "fp32": 4}.get(each.number_format, 2)
    traffic = each.count * (size * (each.m * each.k + each.k * each.n) + each.out * each.m * each.n)
    memory = traffic / (device.hbm_bytes_per_s * device.memory_efficiency)
    return max(arithmetic, memory) + device.kernel_s


@functools.lru_cache(maxsize=1 << 16)
def _filled(m: int, n: int, count: int, num_sms: int) -> float:
    """Share of the multiprocessors' time that output tiles fill, by the best choice of tile."""
    best = 0.0
    for tile_m, tile_n, rate in _TILES:
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
        used = (m / tile_m) * (n / tile_n) / tiles  # of partial tiles
        waves = math.ceil(tiles * count / num_sms)
        best = max(best, rate * used * tiles * count / (waves * num_sms))
    return best


def attention_s(device: Device, each: Core) -> float:
    """Fused attention at the measured rate of the nearest width, less what partly masked tiles and
    filling the pipeline cost a short sequence.
    """
    width = min(device.attention_flops, key=lambda known: abs(int(known) - each.width))
    share = each.length / (each.length + device.attention_half_length)
    rate = device.attention_flops[width][each.backward] * share
    return each.flops / rate + device.kernel_s


def memory_s(device: Device, each: MemoryPass) -> float:
    """Bytes over the rate that elementwise kernels reach, and a launch."""
    rate = device.hbm_bytes_per_s * device.memory_efficiency
    return each.size / rate + (device.kernel_s if each.size else 0.0)


def members_in_node(device: Device, layout: Layout, axis: str) -> int:
    """Neighbours along an axis that share a node: faster axes fill a node first."""
    inner, node = 1, device.node_devices
    for faster in _INNER[axis]:
        inner *= layout.members(faster)
    return max(1, min(layout.members(axis), node // min(inner, node)))


_INNER = {
    "tensor": (),
    "context": ("tensor",),
    "fsdp": ("tensor", "context"),
    EXPERT: ("tensor",),
    NODES: ("tensor", EXPERT),
    "replica": ("tensor", "context", "fsdp"),
    "pipe": ("tensor", "context", "fsdp", "replica"),
}
"""Axes whose neighbours are nearer than those of an axis."""


def collective_s(device: Device, layout: Layout, each: PlannedCollective) -> float:
    """What a device sends at bus bandwidth, a latency, and the turns of a ring."""
    members = layout.members(each.axis)
    if members == 1 or each.size == 0:
        return 0.0
    inside = members_in_node(device, layout, each.axis)
    rate, latency = device.link(inside, members)
    sent = sent_bytes(each.kind, each.size, members)
    if each.kind in ("all-to-all", "permute") and members > inside:
        rate = device.network_bytes_per_s  # each device uses its own adapter
        if each.kind == "all-to-all":
            sent = each.size * (members - inside) / members  # what stays in the node crosses none
    turns = 0.0
    if each.kind in ("all-gather", "reduce-scatter", "all-reduce"):
        # A ring takes a turn a member, twice for an all-reduce; most are within nodes.
        rounds, nodes = 2 if each.kind == "all-reduce" else 1, math.ceil(members / inside)
        turns = rounds * (members * device.node_hop_s + (nodes - 1) * device.network_hop_s)
    return each.count * (sent / rate + latency + turns)


def compute_s(device: Device, operations: Iterable[Operation]) -> dict[str, float]:
    """Seconds by class: matmul, attention, memory."""
    total = {"matmul": 0.0, "attention": 0.0, "memory": 0.0}
    for each in operations:
        match each:
            case PlannedMatmul():
                total["matmul"] += matmul_s(device, each)
            case Core():
                total["attention"] += attention_s(device, each)
            case MemoryPass():
                total["memory"] += memory_s(device, each)
            case PlannedCollective():
                pass
    return total


def communication_s(
    device: Device, layout: Layout, operations: Iterable[Operation], *, hidden: bool
) -> dict[str, float]:
    """Seconds of collectives by axis: those that may hide behind compute, or those that cannot."""
    total: dict[str, float] = {}
    for each in operations:
        if isinstance(each, PlannedCollective) and each.hidden == hidden:
            total[each.axis] = total.get(each.axis, 0.0) + collective_s(device, layout, each)
    return total
