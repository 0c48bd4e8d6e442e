"""Bytes per device by role: weights, gradients, optimizer, activations and KV caches."""

import dataclasses
import functools
from typing import Any

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.model import ExpertsConfig, LatentAttentionConfig
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.model.cache import cached_numbers, recurrent_bytes
from jaxinfra.parallel.exchange import buffer_sizes
from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import LayerKind, PlannedModel
from jaxinfra.planning.operations import loss_form, saved_bytes
from jaxinfra.planning.step import device_parameters, gathered_elements, layer_elements

CACHE_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}
CACHE_BITS |= {CacheFormat.BF16_STATES.value: 16.0}
"""Bits of a cached element."""

_SCALE_BITS = 16  # of a token and a head, in the formats that CacheFormat names


def element_bits(cache_format: str, *, width: float) -> float:
    """Returns the bits per cached element, including its part of the quantization scale.

    Args:
        width: number of elements that share a scale, which is the head dim.
    """
    if cache_format not in CACHE_BITS:
        raise ConfigError(
            f"unknown cache format {cache_format!r}{nearest(cache_format, CACHE_BITS)}"
        )
    bits = CACHE_BITS[cache_format]
    has_scales = cache_format in [form for form in CacheFormat if form.bits]
    return bits + _SCALE_BITS / width if has_scales else bits


def kv_bytes_per_token(model: PlannedModel, cache_format: str = "bf16") -> float:
    """Returns the KV cache bytes of one token of context, over all layers."""
    return _bytes(*cached_numbers(model.config, 1, evicted=False), cache_format)


def kv_bytes(model: PlannedModel, *, batch: int, context: int, cache_format: str = "bf16") -> float:
    """Returns the bytes of ``batch`` caches of ``context`` tokens: keys and values, of which layers
    with windows keep fewer, and states, whose size does not grow.
    """
    tokens = _bytes(*cached_numbers(model.config, context, evicted=True), cache_format)
    return batch * (tokens + sequence_state_bytes(model, cache_format))


def sequence_state_bytes(model: PlannedModel, cache_format: str) -> int:
    """Returns the bytes of one sequence's states, over all layers."""
    sums = 2 if cache_format == CacheFormat.BF16_STATES else 4
    return recurrent_bytes(model.config, accum=sums)


def _bytes(elements: int, scales: int, cache_format: str) -> float:
    width = elements / scales if scales else 1.0
    return elements * element_bits(cache_format, width=width) / 8


def kv_table(model: PlannedModel) -> list[dict[str, Any]]:
    """Compares the model's KV cache size with other numbers of KV heads and other formats."""
    mixers = [block.mixer for block in model.config.layers if block.mixer.cache.arrays]
    if not mixers:
        return []  # states do not grow with the context
    layers, mixer = len(mixers), mixers[0]
    heads, kv_heads = mixer.num_q_heads, mixer.num_kv_heads
    one = layers * 2.0 * mixer.value_width / heads
    forms = {"MHA": heads * one, "MQA": one}
    form = {1: "MQA", heads: "MHA"}.get(kv_heads, f"GQA-{kv_heads}")
    if isinstance(mixer, LatentAttentionConfig):
        form = "MLA"
    forms = {name: size for name, size in forms.items() if name != form}
    elements, scales = cached_numbers(model.config, 1, evicted=False)
    forms[f"{form} (this model)"] = elements
    whole, width = heads * one * 2, elements / scales
    return [
        {
            "form": form,
            "cache_format": name,
            "bytes_per_token": elements * element_bits(name, width=width) / 8,
            # Times less than MHA in bf16.
            "over_mha": whole / (elements * element_bits(name, width=width) / 8),
        }
        for form, elements in forms.items()
        for name in ("bf16", "fp8", "int8", "int4")
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak bytes per device in a training step, by role (weights, gradients, activations...)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept from forward to backward, all micro-batches in flight
    buffers: float  # working set and gathered weights of one layer, or of the loss if larger
    reserved: float  # context, communication buffers, fragmentation

    @property
    def total(self) -> float:
        """Peak bytes per device, summed over all roles."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.buffers + self.reserved

    @property
    def arrays(self) -> float:
        """Bytes per device that JAX allocates: all roles but the reserve."""
        return self.total - self.reserved

    @property
    def temporaries(self) -> float:
        """Bytes per device that XLA allocates within a step: no arguments, no reserve."""
        return self.gradients + self.activations + self.buffers


def memory(model: PlannedModel, layout: Layout, device: Device) -> Memory:
    """Predicts the peak memory of the busiest device, which has the pipeline's first stage."""
    weights, gradients, optimizer = state_bytes(model, layout)
    recipe = layout.training_recipe
    sums = gradients * recipe.summed_bytes / recipe.gradient_bytes
    if layout.accumulation == 1:
        sums = 0.0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activation_bytes(model, layout),
        buffers=_buffers(model, layout, gradients, sums=sums),
        reserved=float(device.reserved_bytes),
    )


def state_bytes(model: PlannedModel, layout: Layout) -> tuple[float, float, float]:
    """Returns bytes of weights, gradients and optimizer state, by ZeRO stage and recipe."""
    recipe = layout.training_recipe
    weights = gradients = optimizer = 0.0
    for experts in (False, True):
        elements = device_parameters(model, layout, experts=experts)
        shards = layout.data_shards(experts=experts)
        weights += recipe.weights * elements / (shards if layout.zero >= 3 else 1)
        gradients += recipe.gradient_bytes * elements / (shards if layout.zero >= 2 else 1)
        optimizer += recipe.optimizer_bytes * elements / (shards if layout.zero >= 1 else 1)
    return weights, gradients, optimizer


def micro_batches_in_flight(layout: Layout) -> float:
    """Counts micro-batches whose activations the pipeline's first stage stores at once.

    With p stages, 1F1B stores p, however many micro-batches a step has. Interleaved 1F1B with v
    chunks per stage stores 1 + (p-1)/(p v) times as many.
    """
    pipe, chunks = layout.mesh.pipe, layout.chunks
    held = min(pipe, layout.accumulation) if pipe > 1 else 1
    extra = (pipe - 1) / (pipe * chunks) if chunks > 1 else 0.0
    return held * (1 + extra)


def activation_bytes(model: PlannedModel, layout: Layout) -> float:
    """Returns activation bytes that the first pipeline stage keeps from forward to backward."""
    saved = sum(layer.count * saved_bytes(layer, layout) for layer in model.layers)
    if layout.keeps_gathered_experts:
        kept = device_parameters(model, layout, experts=True) * layout.mesh.pipe
        saved += layout.activation_bytes * kept
    if layout.keep_gathered:
        saved += layout.activation_bytes * gathered_elements(model, layout)
    if layout.training_recipe.compute == "fp8" and layout.remat not in (Remat.NAMED, Remat.FULL):
        # The 8-bit weights, a byte per element, as this device stores them.
        shards = layout.mesh.fsdp if layout.zero == 3 else 1
        elements = sum(
            layer.count * layer_elements(layer, layout.mesh.tensor, 1, experts=False)
            for layer in model.layers
        )
        saved += elements / shards
    return saved / layout.mesh.pipe * micro_batches_in_flight(layout)


def _buffers(model: PlannedModel, layout: Layout, gradients: float, *, sums: float) -> float:
    """Returns bytes of the largest temporary working set: of one layer, or of the loss.

    The loss runs before the layers' gradients exist, so it only counts where it exceeds them:
    a chunk of logits and their gradient, the table's gradient and its 16-bit copy.

    Args:
        sums: the part of the gradients that the micro-batches before have left.
    """
    layer = max(_working_set(layer, layout) for layer in model.layers)
    if layout.mesh.expert > 1 and layout.zero == 3:
        # The loop over layers hands its backward pass a copy of the device's share of all experts.
        elements = device_parameters(model, layout, experts=True)
        shards = layout.data_shards(experts=True)
        layer += layout.training_recipe.weights * elements / shards
    table = 6.0 * model.config.vocab_size * model.config.model_dim / layout.mesh.tensor
    loss = loss_form(model, layout).chunk_bytes + table
    return max(layer, loss + sums - gradients)


@functools.lru_cache(maxsize=4096)
def _room_for_rows(
    tokens: int, num_devices: int, experts: ExpertsConfig, exchange: ExchangeConfig
) -> int:
    """Returns the number of rows for which the experts of one device have room."""
    return buffer_sizes(tokens, num_devices=num_devices, experts=experts, exchange=exchange).choices


def _working_set(layer: LayerKind, layout: Layout) -> float:
    tokens, tensor, item = layout.micro_tokens, layout.mesh.tensor, layout.activation_bytes
    stream = item * tokens * layer.model_dim / (tensor if layout.sequence_parallel else 1)
    hidden, routed = item * tokens * layer.hidden_width / tensor, 0.0
    experts = layer.feed_forward
    if isinstance(experts, ExpertsConfig):
        rows = tokens * experts.top_k
        if layout.mesh.expert > 1:
            # Buffers have room for more rows than there are, up to those of all devices.
            room = _room_for_rows(tokens, layout.mesh.expert, experts, layout.exchange)
            hidden += item * (room - rows) * experts.hidden_dim / tensor
            routed = 2 * item * rows * layer.model_dim  # what is sent and what has arrived
            rows = room
        # Results of the experts, again as the backward pass computes them, and their gradient.
        routed += 3 * item * rows * layer.model_dim
    again = 0.0
    if layout.remat in (Remat.FULL, Remat.NAMED, Remat.MLP):
        # The layer's forward pass runs again before its backward pass.
        dots = saved_bytes(layer, layout, remat=Remat.DOTS)
        again = dots - saved_bytes(layer, layout) + 2 * hidden
    gathered = 0.0
    if layout.zero == 3 and layout.mesh.fsdp > 1:
        tensor, expert = layout.mesh.tensor, layout.mesh.expert
        one = sum(layer_elements(layer, tensor, expert, experts=each) for each in (False, True))
        gathered = 2 * item * one  # this layer's weights, and the next one's on their way
    return again + gathered + routed + hidden + 2 * stream
