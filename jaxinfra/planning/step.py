"""Predicted seconds of a training step and of its parts.

Each operation has its own roofline: a matmul by its shape, a memory pass, attention, a collective.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable

from jaxinfra.config.mesh import EXPERT, NODES
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.model.definition import ParameterInfo
from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import LayerKind, PlannedModel, is_expert, shards, used_shards
from jaxinfra.planning.operations import (
    Core,
    MemoryPass,
    Operation,
    PlannedCollective,
    PlannedMatmul,
    embedding_operations,
    layer_operations,
    loss_operations,
)

# Output tiles that libraries choose from, and how much of the large tile's rate each reaches.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 256, 0.9), (64, 128, 0.8))


def matmul_s(device: Device, each: PlannedMatmul) -> float:
    """Returns seconds of a matmul: the larger of arithmetic and memory time, plus a launch.

    Arithmetic runs at the rate of large matmuls, reduced by two losses: SMs idle in the last wave
    of output tiles, and a short contraction does not fill the tensor cores' pipeline.
    """
    peak = device.flops[each.number_format] * device.matmul_efficiency[each.number_format]
    depth = each.k / (each.k + device.matmul_half_depth)
    filled = _filled(
        max(int(each.m), 1), max(int(each.n), 1), max(int(each.count), 1), device.num_sms
    )
    # A deep contraction with few output tiles is split over the idle SMs.
    if filled < 0.5 and each.k > 4096:
        filled = max(filled, 0.7)
    arithmetic = 2 * each.m * each.n * each.k * each.count / (peak * depth * max(filled, 1e-3))
    size = {"fp8": 1, "fp32": 4}.get(each.number_format, 2)
    traffic = each.count * (size * (each.m * each.k + each.k * each.n) + each.out * each.m * each.n)
    memory = traffic / (device.hbm_bytes_per_s * device.memory_efficiency)
    return max(arithmetic, memory) + device.kernel_s


@functools.lru_cache(maxsize=1 << 16)
def _filled(m: int, n: int, count: int, num_sms: int) -> float:
    """Returns the share of SM time that output tiles fill, with the best tile shape."""
    best = 0.0
    for tile_m, tile_n, rate in _TILES:
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
        used = (m / tile_m) * (n / tile_n) / tiles  # of partial tiles
        waves = math.ceil(tiles * count / num_sms)
        best = max(best, rate * used * tiles * count / (waves * num_sms))
    return best


def attention_s(device: Device, each: Core) -> float:
    """Returns seconds of fused attention, at the measured rate of the nearest head width.

    The rate is lower for short sequences, for partly masked tiles and the pipeline's start.
    """
    width = min(device.attention_flops, key=lambda known: abs(int(known) - each.width))
    share = each.length / (each.length + device.attention_half_length)
    rate = device.attention_flops[width][each.backward] * share
    return each.flops / rate + device.kernel_s


def memory_s(device: Device, each: MemoryPass) -> float:
    """Returns seconds of a memory pass: bytes at the rate of elementwise kernels, and a launch."""
    rate = device.hbm_bytes_per_s * device.memory_efficiency
    return each.size / rate + (device.kernel_s if each.size else 0.0)


def members_in_node(device: Device, layout: Layout, axis: str) -> int:
    """Returns how many devices along a mesh axis are in one node; inner axes fill it first."""
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
    """Returns seconds of a collective: bytes over bus bandwidth, plus latency of the ring."""
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A training step's seconds by cause, which add up to ``total_s``."""

    parts: dict[str, float]
    hidden: dict[str, float]  # communication hidden by compute, by axis; not part of the total
    bubble_fraction: float  # (p-1)/(m v + p-1): idle share of the pipeline's own time
    model_flops: float  # of the whole step, over all devices

    @property
    def total_s(self) -> float:
        """Predicted seconds per step."""
        return sum(self.parts.values())


def step_time(model: PlannedModel, layout: Layout, device: Device) -> StepTime:
    """Predicts the time of a training step; the layout must have passed ``layout.check``."""
    stages, micro, chunks = layout.mesh.pipe, layout.accumulation, layout.chunks
    body = _stage_seconds(model, layout, device)
    ends = _end_seconds(model, layout.of_one_layer, device)
    once = micro + (stages - 1) / chunks  # passes that one device's time is as long as
    parts = {name: micro * seconds for name, seconds in body.compute.items()}
    # One stage has the loss: with several, the others wait for it.
    parts["loss and embedding"] = micro * sum(ends.compute.values())
    passes = sum(memory_s(device, each) for each in weight_passes(model, layout))
    parts["weights and gradients"] = micro * passes
    beside, hidden_tensor = _hide(
        layout,
        micro * body.hidden.get("tensor", 0.0),
        window=parts["matmul"],
        share=device.beside,
    )
    parts["tensor communication"] = beside + micro * (
        body.exposed.get("tensor", 0.0) + ends.exposed.get("tensor", 0.0)
    )
    for axis in (EXPERT, NODES):
        parts[f"{axis} communication"] = micro * body.exposed.get(axis, 0.0)
    attention = micro * body.compute["attention"]
    ring = micro * body.hidden.get("context", 0.0)
    parts["context communication"], hidden_ring = _hide(
        layout, ring, window=attention, share=device.beside
    )
    # Activations and gradients between stages; without a pipeline they go nowhere.
    sends = stage_sends(model, layout, micro + stages - 1)
    parts["pipeline transfers"] = collective_s(device, layout, sends)
    busy = body.total + passes + parts["context communication"] / micro
    parts["pipeline bubble"] = (once - micro) * busy
    window = micro * (sum(body.compute.values()) + passes)
    data = _data_communication(model, layout, device)
    hidden: dict[str, float] = {"context": hidden_ring, "tensor": hidden_tensor}
    for axis, (seconds, behind) in data.items():
        exposed, beside = _hide(layout, seconds, window=window * behind, share=device.overlap)
        parts[f"{axis} communication"] = exposed
        hidden[axis] = beside
        window = max(window - beside, 0.0)
    parts["optimizer"] = _optimizer_s(model, layout, device)
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0.0},
        hidden={axis: seconds for axis, seconds in hidden.items() if seconds > 0.0},
        bubble_fraction=(stages - 1) / (micro * chunks + stages - 1),
        model_flops=model.training_flops(layout.length, batch=layout.batch),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds of some operations: compute by class, and collectives by axis."""

    compute: dict[str, float]
    exposed: dict[str, float]
    hidden: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.compute.values()) + sum(self.exposed.values())


@functools.lru_cache(maxsize=1 << 14)
def _layer_seconds(layer: LayerKind, layout: Layout, device: Device) -> _Seconds:
    operations = layer_operations(layer, layout)
    seconds = _price([*operations.forward, *operations.backward], layout, device)
    again = _price(operations.recomputed, layout, device)
    compute = {**seconds.compute, "recomputation": sum(again.compute.values())}
    exposed = _sum((seconds.exposed, 1.0), (again.exposed, 1.0))
    return _Seconds(compute, exposed, _sum((seconds.hidden, 1.0), (again.hidden, 1.0)))


def _price(operations: Iterable[Operation], layout: Layout, device: Device) -> _Seconds:
    compute = {"matmul": 0.0, "attention": 0.0, "memory": 0.0}
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for each in operations:
        match each:
            case PlannedMatmul():
                compute["matmul"] += matmul_s(device, each)
            case Core():
                compute["attention"] += attention_s(device, each)
            case MemoryPass():
                compute["memory"] += memory_s(device, each)
            case PlannedCollective():
                axes = hidden if each.hidden else exposed
                axes[each.axis] = axes.get(each.axis, 0.0) + collective_s(device, layout, each)
    return _Seconds(compute, exposed, hidden)


def _sum(*terms: tuple[dict[str, float], float]) -> dict[str, float]:
    """Sums dicts by name, each times its count."""
    names = {name: None for term, _ in terms for name in term}
    return {name: sum(times * term.get(name, 0.0) for term, times in terms) for name in names}


@functools.lru_cache(maxsize=1 << 12)
def _end_seconds(model: PlannedModel, layout: Layout, device: Device) -> _Seconds:
    ends = [*loss_operations(model, layout), *embedding_operations(model, layout)]
    return _price(ends, layout, device)


def _stage_seconds(model: PlannedModel, layout: Layout, device: Device) -> _Seconds:
    """Returns seconds of one pipeline stage's layers, for one micro-batch."""
    alike = layout.of_one_layer
    kinds = [
        (_layer_seconds(layer, alike, device), layer.count / layout.mesh.pipe)
        for layer in model.layers
    ]
    return _Seconds(
        *(
            _sum(*((getattr(seconds, part), count) for seconds, count in kinds))
            for part in ("compute", "exposed", "hidden")
        )
    )


def _hide(layout: Layout, seconds: float, *, window: float, share: float) -> tuple[float, float]:
    """Returns exposed seconds of communication, and the seconds hidden by ``window`` of compute."""
    if not layout.traits.overlap:
        return seconds, 0.0
    hidden = min(seconds * share, window)
    return seconds - hidden, hidden


def stage_sends(model: PlannedModel, layout: Layout, num_rounds: int) -> PlannedCollective:
    """Returns one pipeline stage's sends of activations and their gradients.

    Each tensor shard sends its own part (scatter/gather optimization, arXiv 2104.04473, 4.1).

    Args:
        num_rounds: in each round, a stage sends one micro-batch per chunk in both passes.
    """
    size = (
        layout.activation_bytes * layout.micro_tokens * model.config.model_dim / layout.mesh.tensor
    )
    return PlannedCollective("send", "permute", "pipe", size, count=2 * layout.chunks * num_rounds)


def device_parameters(
    model: PlannedModel, layout: Layout, *, experts: bool, used: bool = False
) -> float:
    """Counts parameters of one device's pipeline stage before any data-parallel sharding.

    The first stage has the embedding and the last one the output head; the larger of both counts.

    Args:
        experts: whether to count routed experts' parameters, or all others.
        used: whether to count used instead of stored parameters. With fewer KV heads than tensor
            devices, a device stores all KV heads and uses one.
    """
    mesh = layout.mesh
    layers = sum(
        layer.count * layer_elements(layer, mesh.tensor, mesh.expert, experts=experts, used=used)
        for layer in model.layers
    )
    ends = [0.0 if experts else _elements(each, mesh.tensor, 1, used=used) for each in model.ends]
    return layers / mesh.pipe + (sum(ends) if mesh.pipe == 1 else max(ends))


@functools.lru_cache(maxsize=1 << 12)
def layer_elements(
    layer: LayerKind, tensor: int, expert: int, *, experts: bool, used: bool = False
) -> float:
    """Counts one layer's elements on a device; ``experts`` and ``used`` as in device_parameters."""
    return sum(
        _elements(each, tensor, expert, used=used)
        for each in layer.parameters
        if is_expert(each) == experts
    )


def _elements(parameter: ParameterInfo, tensor: int, expert: int, *, used: bool) -> float:
    if used:
        by_expert = expert if is_expert(parameter) else 1
        return parameter.size / (used_shards(parameter, tensor=tensor) * by_expert)
    return parameter.size / shards(parameter, tensor=tensor, expert=expert)


def gathered_elements(model: PlannedModel, layout: Layout) -> float:
    """Counts the all-gathered elements of all layers' weights that ``keep_gathered`` keeps.

    Routed experts are not counted: their exchange gathers them.
    """
    return sum(
        layer.count * layer_elements(layer, layout.mesh.tensor, 1, experts=False, used=True)
        for layer in model.layers
    )


def weight_passes(model: PlannedModel, layout: Layout) -> list[MemoryPass]:
    """Lists a micro-batch's memory passes over weights and gradients, apart from matmuls."""
    found: list[MemoryPass] = []
    for experts in (False, True):
        elements = device_parameters(model, layout, experts=experts)
        if not elements:
            continue
        shards = layout.data_shards(experts=experts)
        if layout.traits.casts_weights:
            # fp32 read and 16 bits written, in the forward and in the backward pass; what is
            # sharded is cast before it is gathered.
            cast = elements / (shards if layout.zero >= 3 else 1)
            passes = 1 if layout.keep_gathered and not experts else 2
            found.append(MemoryPass("cast weights", passes * 6 * cast))
        own = elements / (shards if layout.zero >= 2 else 1)
        if layout.traits.scans_layers:
            # The loop's stack of gradients is filled with zeros, then each layer's is copied in.
            found.append(MemoryPass("stack gradients", 8 * own))
        if layout.accumulation > 1:
            # Read, read the sum, write it; or in the matmul, which reads and writes the sum.
            found.append(MemoryPass("sum gradients", (12 if layout.traits.sums_apart else 8) * own))
    if layout.keep_gathered and layout.traits.scans_layers:
        kept = layout.activation_bytes * gathered_elements(model, layout)
        found.append(MemoryPass("stack gathered weights", 2 * kept))
    return found


def data_collectives(model: PlannedModel, layout: Layout) -> list[PlannedCollective]:
    """Lists a step's all-gathers of weights and gradient reductions over the data axes."""
    recipe = layout.training_recipe
    item = max(recipe.gradients, recipe.accumulated)
    found: list[PlannedCollective] = []
    for experts in (False, True):
        elements = device_parameters(model, layout, experts=experts)
        if not elements:
            continue
        # An expert's copies are fewer: the expert axis takes its devices from the data axes.
        fsdp = layout.data_shards(experts=experts)
        if layout.zero == 3 and fsdp > 1:
            used = device_parameters(model, layout, experts=experts, used=True)
            found += _sharded_weights(model, layout, used, item, experts=experts)
        elif fsdp > 1:
            kind = "all-reduce" if layout.zero == 0 else "reduce-scatter"
            # Where gradients are sharded, no device has room to sum micro-batches first.
            times = layout.accumulation if layout.zero == 2 else 1
            found.append(PlannedCollective("gradients", kind, "fsdp", item * elements, True, times))
            if layout.zero in (1, 2):
                found.append(
                    PlannedCollective(
                        "new weights", "all-gather", "fsdp", elements * recipe.weights, True
                    )
                )
        # Each axis sums what those before it have scattered.
        size = item * elements / (fsdp if layout.zero >= 1 else 1)
        for axis, members in (("replica", layout.mesh.replica), ("context", layout.mesh.context)):
            if members > 1 and not (experts and axis in layout.mesh.expert_axes):
                found.append(PlannedCollective("gradients", "all-reduce", axis, size, True))
                size /= members
    return found


def _sharded_weights(
    model: PlannedModel, layout: Layout, elements: float, item: float, *, experts: bool
) -> list[PlannedCollective]:
    """Fully sharded, each micro-batch: the logits' table is gathered once, layers before their
    forward and, unless what was gathered stays, before their backward pass; gradients are reduced
    to their shards. Rows of the input table go to their tokens instead, and their gradients back.
    """
    stays = layout.keeps_gathered_experts if experts else layout.keep_gathered
    passes = 1 if stays else 2
    micro, table = layout.accumulation, 0.0
    found: list[PlannedCollective] = []
    if not experts:
        table = float(model.config.vocab_size * model.config.model_dim / layout.mesh.tensor)
        tables = 1 if model.config.tie_embeddings or layout.mesh.pipe > 1 else 2
        elements -= tables * table
        rows = layout.activation_bytes * layout.micro_tokens * model.config.model_dim
        found.append(PlannedCollective("rows", "all-to-all", "fsdp", rows, True, 2 * micro))
    wide = layout.activation_bytes  # the logits' table, and experts unless they are asked for
    in_eight_bits = layout.training_recipe.compute == "fp8" and not experts
    gathered = 1.0 if in_eight_bits else wide
    calls = passes * _calls(model, layout, gathered, experts=experts) + (table > 0)
    size = (gathered * passes * elements + wide * table) / calls
    found.append(PlannedCollective("weights", "all-gather", "fsdp", size, True, micro * calls))
    calls = _calls(model, layout, item, experts=experts) + (table > 0)
    size = item * (elements + table) / calls
    found.append(
        PlannedCollective("gradients", "reduce-scatter", "fsdp", size, True, micro * calls)
    )
    return found


@functools.lru_cache(maxsize=1 << 12)
def _layer_calls(layer: LayerKind, tensor: int, expert: int, item: float, *, experts: bool) -> int:
    """Collectives of one layer's weights: matrices of less than XLA's threshold share one."""
    sizes = [
        item * _elements(each, tensor, expert, used=True)
        for each in layer.parameters
        if is_expert(each) == experts
    ]
    small = sum(size for size in sizes if size < _COMBINED_BYTES)
    return sum(size >= _COMBINED_BYTES for size in sizes) + math.ceil(small / _COMBINED_BYTES)


_COMBINED_BYTES = 30 * 2**20  # xla_gpu_all_gather_combine_threshold_bytes and its like


def _calls(model: PlannedModel, layout: Layout, item: float, *, experts: bool) -> int:
    """Lists collectives of weights in one pass over a pipeline stage's layers."""
    layers = sum(
        layer.count
        * _layer_calls(layer, layout.mesh.tensor, layout.mesh.expert, item, experts=experts)
        for layer in model.layers
    )
    return max(math.ceil(layers / layout.mesh.pipe), 1)


def _data_communication(
    model: PlannedModel, layout: Layout, device: Device
) -> dict[str, tuple[float, float]]:
    """Returns seconds of data-axis collectives by axis, and the compute share that hides them."""
    found: dict[str, tuple[float, float]] = {}
    # Whole gradients are complete in the last micro-batch's backward pass only.
    last = 2 / 3 / (layout.accumulation if layout.zero < 2 else 1)
    for each in data_collectives(model, layout):
        seconds, behind = found.get(each.axis, (0.0, last))
        behind = 1.0 if each.name == "weights" else behind
        found[each.axis] = (seconds + collective_s(device, layout, each), behind)
    return found


def _optimizer_s(model: PlannedModel, layout: Layout, device: Device) -> float:
    """Returns seconds of the update: state is read and written, gradients are read twice."""
    recipe = layout.training_recipe
    a_parameter = 2 * (recipe.weights + recipe.summed_bytes + recipe.optimizer_bytes)
    elements = sum(
        device_parameters(model, layout, experts=experts)
        / (layout.data_shards(experts=experts) if layout.zero >= 1 else 1)
        for experts in (False, True)
    )
    return memory_s(device, MemoryPass("optimizer", a_parameter * elements))
