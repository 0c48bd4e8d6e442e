"""Bytes a device by role: weights, gradients, optimizer, activations and buffers."""

import dataclasses
import functools

from jaxinfra.config.run import Remat
from jaxinfra.planning.devices import Device
from jaxinfra.planning.formats import RECIPES
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.loss import loss_form
from jaxinfra.planning.operations import saved_bytes, shards
from jaxinfra.planning.shapes import Dense, LayerShape, ModelShape, layer_weights
from jaxinfra.planning.step import device_parameters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak bytes of one device during a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept from forward to backward, all micro-batches in flight
    buffers: float  # one layer's working set and gathered weights, or the loss's
    reserved: float  # context, communication buffers, fragmentation

    @property
    def total(self) -> float:
        """Sum over the roles."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def temporaries(self) -> float:
        """What XLA allocates within a step: all but the arguments and the reserve."""
        return self.gradients + self.activations + self.buffers


def zero_bytes(parameters: float, devices: int, stage: int, *, recipe: str = "fp16-adam") -> float:
    """Bytes a device of weights, gradients and optimizer at a ZeRO stage.

    (W + G + O), (W + G + O/N), (W + (G + O)/N), (W + G + O)/N (arXiv 1910.02054, figure 1).
    """
    sizes = RECIPES[recipe]
    by_stage = (
        (sizes.optimizer_bytes, 1),
        (sizes.gradient_bytes, 2),
        (sizes.weights, 3),
    )
    return sum(size * parameters / (devices if stage >= first else 1) for size, first in by_stage)


def megatron_activation_bytes(
    *,
    layers: int,
    width: int,
    heads: int,
    length: int,
    micro_batch: int,
    tensor: int,
    pipe: int = 1,
    chunks: int = 1,
    sequence_parallel: bool = False,
    selective: bool = False,
) -> float:
    """Activations of the first pipeline stage's device, without full recomputation.

    s b h L (10 + 24/t + 5 a s/(h t)), or s b h L (34/t + 5 a s/(h t)) with sequence parallelism,
    less the score term with selective recomputation; the stage holds p micro-batches of L/p
    layers, and 1 + (p-1)/(p m) times as much interleaved in m chunks (arXiv 2205.05198,
    equations 2, 4, 6 and section 4.2.3).
    """
    scores = 0.0 if selective else 5 * heads * length / (width * tensor)
    rest = 34 / tensor if sequence_parallel else 10 + 24 / tensor
    whole = length * micro_batch * width * layers * (rest + scores)
    return whole * (1 + (pipe - 1) / (pipe * chunks) if chunks > 1 else 1)


def memory(shape: ModelShape, layout: Layout, device: Device) -> Memory:
    """Predicted peak of the busiest device: the pipeline's first stage."""
    weights, gradients, optimizer = state_bytes(shape, layout)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(shape, layout),
        buffers=_buffers(shape, layout, gradients),
        reserved=float(device.reserved_bytes),
    )


def state_bytes(shape: ModelShape, layout: Layout) -> tuple[float, float, float]:
    """Weights, gradients and optimizer by ZeRO stage and recipe."""
    recipe = layout.bytes_a_parameter
    weights = gradients = optimizer = 0.0
    for experts in (False, True):
        elements = device_parameters(shape, layout, experts=experts)
        shards = max(layout.mesh.fsdp // layout.mesh.expert, 1) if experts else layout.mesh.fsdp
        weights += recipe.weights * elements / (shards if layout.zero >= 3 else 1)
        gradients += recipe.gradient_bytes * elements / (shards if layout.zero >= 2 else 1)
        optimizer += recipe.optimizer_bytes * elements / (shards if layout.zero >= 1 else 1)
    return weights, gradients, optimizer


def micro_batches_in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage holds, in units of its own layers.

    p of them in 1F1B (flat in the number of micro-batches), 1 + (p-1)/(p v) times as many
    interleaved.
    """
    held = min(layout.mesh.pipe, layout.accumulation) if layout.mesh.pipe > 1 else 1
    extra = (
        (layout.mesh.pipe - 1) / (layout.mesh.pipe * layout.chunks) if layout.chunks > 1 else 0.0
    )
    return held * (1 + extra)


def _activations(shape: ModelShape, layout: Layout) -> float:
    saved = sum(layer.count * saved_bytes(layer, shape.model_dim, layout) for layer in shape.layers)
    return saved / layout.mesh.pipe * micro_batches_in_flight(layout)


def _buffers(shape: ModelShape, layout: Layout, gradients: float) -> float:
    """What the peak holds beyond the other roles: a layer's working set, or the loss's.

    The loss runs before the layers' gradients exist, so it only counts where it exceeds them:
    a chunk of logits and their gradient, the table's gradient and its 16-bit copy.
    """
    layer = max(_working_set(layer, shape.model_dim, layout) for layer in shape.layers)
    table = 6.0 * shape.vocab_size * shape.model_dim / layout.mesh.tensor
    loss = logits_bytes(shape, layout) + table
    held = gradients if layout.accumulation > 1 else 0.0
    return max(layer, loss + held - gradients)


def logits_bytes(shape: ModelShape, layout: Layout) -> float:
    """fp32 logits and their 16-bit gradient, or exponentials; of a chunk where it is fused."""
    return loss_form(shape, layout).chunk_bytes


def _working_set(layer: LayerShape, model_dim: int, layout: Layout) -> float:
    tokens, tensor, item = layout.micro_tokens, layout.mesh.tensor, layout.activation_bytes
    stream = item * tokens * model_dim / (tensor if layout.sequence_parallel else 1)
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, Dense):
        width, routed = feed_forward.hidden_dim, 0.0
    else:
        width = feed_forward.top_k * feed_forward.hidden_dim + feed_forward.shared_hidden_dim
        routed = 2 * item * tokens * feed_forward.top_k * model_dim
    hidden = item * tokens * width / tensor
    again = 0.0
    if layout.remat in (Remat.FULL, Remat.NAMED, Remat.MLP):
        # The layer's forward pass runs again before its backward pass.
        again = saved_bytes(layer, model_dim, layout, remat=Remat.DOTS)
        again -= saved_bytes(layer, model_dim, layout)
        again += 2 * hidden
    gathered = 0.0
    if layout.zero == 3 and layout.mesh.fsdp > 1:
        one = _layer_elements(layer, model_dim, layout.mesh.tensor, layout.mesh.expert)
        gathered = 2 * item * one  # this layer's weights, and the next one's on their way
    return again + gathered + routed + hidden + 2 * stream


@functools.lru_cache(maxsize=1 << 10)
def _layer_elements(layer: LayerShape, model_dim: int, tensor: int, expert: int) -> float:
    return sum(
        weight.elements / shards(weight, tensor=tensor, expert=expert)
        for weight in layer_weights(layer, model_dim)
    )
