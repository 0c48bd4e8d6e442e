"""A training step as lists of matmuls, memory passes and collectives of one device.

Every array that a kernel reads or writes counts once, activations with 2 bytes per element. The
loss is computed as ``linear_cross_entropy`` does on a Hopper GPU. That is a kernel in bf16 if a
device has enough vocabulary ids, else fp32 logits by XLA. Dims: M tokens of a micro-batch on this
device.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from jaxinfra.axes import EMBED, EXPERTS, LATENT, MLP
from jaxinfra.config.latent import IndexerConfig, indexer_of
from jaxinfra.config.mesh import EXPERT, NODES
from jaxinfra.config.model import ExpertsConfig, LatentAttentionConfig
from jaxinfra.config.recurrent import GatedDeltaConfig, RecurrentConfig
from jaxinfra.config.run import ContextMethod, Remat
from jaxinfra.model.definition import ParameterInfo
from jaxinfra.model.flops import attention_flops
from jaxinfra.ops.cross_entropy import HOPPER_LEAST_IDS, hopper_chunks, xla_chunks
from jaxinfra.parallel.context.methods import context_bytes
from jaxinfra.parallel.exchange import buffer_sizes, exchanged_bytes
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import LayerKind, PlannedModel, is_expert, shards, used_shards


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedMatmul:
    """``count`` equal matmuls [m, k] x [k, n]; ``out`` is bytes per element of the result."""

    name: str
    m: float
    n: float
    k: float
    count: float = 1
    number_format: str = "bf16"
    out: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPass:
    """An elementwise kernel; ``size`` is the sum of the bytes that it reads and writes."""

    name: str
    size: float


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """The FLOPs and shape of fused attention in one pass of a layer."""

    name: str
    flops: float
    width: int
    length: int  # tokens of a sequence in one kernel call
    backward: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One kind of collective over a mesh axis, with its bytes and number of calls.

    Its ``size`` is the bytes of the whole array on one device: an all-gather's output, a
    reduce-scatter's input, or either side of an all-reduce or exchange.
    """

    name: str
    kind: str
    axis: str
    size: float
    hidden: bool = False  # runs at the same time as compute if ``Traits`` overlap its axis
    count: float = 1


type Operation = PlannedMatmul | MemoryPass | Core | PlannedCollective


@dataclasses.dataclass(frozen=True, slots=True)
class LayerOperations:
    """All matmuls, memory passes and collectives of one layer, micro-batch and device, by pass."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    recomputed: tuple[Operation, ...]


def layer_operations(layer: LayerKind, layout: Layout) -> LayerOperations:
    """Lists one layer's operations in the forward, backward and recomputed pass."""
    weights = [each for each in layer.parameters if each.matmul]
    matmuls = [_matmul(each, layout) for each in weights]
    core_forward, core_backward = _core(layer, layout)
    passes, passes_backward = _memory(layer, layout)
    exchange = _exchange(layer, layout)
    copied = [each for weight in weights for each in _copied_heads(weight, layout)]
    reduce_forward, reduce_backward = _tensor(layer, layout)
    forward = [*matmuls, *core_forward, *passes, *exchange, *reduce_forward]
    # The layer's own output is not needed again, so its sum over the axis is not either.
    reduce_again = [
        each if each.kind == "all-gather" else dataclasses.replace(each, count=each.count / 2)
        for each in reduce_forward
    ]
    # Nor is the rows' way back.
    exchange_again = [
        dataclasses.replace(each, count=1) if isinstance(each, PlannedCollective) else each
        for each in exchange
    ]
    recomputed: list[Operation] = []
    match layout.remat:
        case Remat.FULL:
            recomputed = [*matmuls, *core_forward, *passes, *exchange_again, *reduce_again]
        case Remat.NAMED:
            recomputed = [*matmuls, *passes, *exchange_again, *reduce_again]
        case Remat.MLP:
            wide = [_matmul(each, layout) for each in weights if each.dims[-1] == MLP]
            recomputed = [*wide, *passes, *exchange_again]
        case Remat.DOTS:
            recomputed = [*passes, *exchange_again]
        case _ if layout.traits.recomputes_scores:
            recomputed = list(core_forward)
        case _:
            pass
    if layout.traits.scans_layers:
        forward.append(MemoryPass("stack saved", 2 * saved_bytes(layer, layout)))
    backward = [
        *(_input_gradient(each) for each in matmuls),
        *(_weight_gradient(each) for each in matmuls),
        *core_backward,
        *passes_backward,
        *(
            dataclasses.replace(each, name=f"{each.name} gradient")
            for each in exchange
            if each.name != _CHOICES
        ),
        *reduce_backward,
        *copied,
    ]
    return LayerOperations(tuple(forward), tuple(backward), tuple(recomputed))


def _matmul(parameter: ParameterInfo, layout: Layout) -> PlannedMatmul:
    """Returns a weight's matmul over one micro-batch's tokens on one device."""
    tokens, name = float(layout.micro_tokens), parameter.path.removesuffix("/weight")
    sizes = [n for dim, n in zip(parameter.dims, parameter.shape, strict=True) if dim != EXPERTS]
    elements, count = math.prod(sizes), 1.0
    if is_expert(parameter):
        experts = parameter.size // elements
        count = max(experts / layout.mesh.expert, 1)
        tokens = max(tokens * parameter.active * experts / count, 1.0)
    tensor = used_shards(parameter, tensor=layout.mesh.tensor)
    number_format = layout.training_recipe.compute
    if _is_inward(parameter):
        depth = sizes[0]
        width = elements // depth
        return PlannedMatmul(name, tokens, width / tensor, depth, count, number_format)
    # Outward: all dims but the last are contracted.
    width = sizes[-1]
    return PlannedMatmul(name, tokens, width, elements // width / tensor, count, number_format)


def _is_inward(parameter: ParameterInfo) -> bool:
    """Tells whether a weight multiplies the residual stream, or a latent, along its first dim."""
    first = next(dim for dim in parameter.dims if dim != EXPERTS)
    return first in (EMBED, LATENT)


def _copied_heads(parameter: ParameterInfo, layout: Layout) -> list[PlannedCollective]:
    """Gradients of heads fewer than the tensor axis: summed over the copies of a head, and all of
    them gathered, because every device keeps them whole.
    """
    heads = used_shards(parameter, tensor=layout.mesh.tensor)
    if heads == shards(parameter, tensor=layout.mesh.tensor, expert=1):
        return []
    size = layout.training_recipe.gradients * parameter.size
    return [
        PlannedCollective("sum copies", "all-reduce", "tensor", size / heads),
        PlannedCollective("gather heads", "all-gather", "tensor", size),
    ]


def _input_gradient(each: PlannedMatmul) -> PlannedMatmul:
    return dataclasses.replace(each, name=f"{each.name} dx", n=each.k, k=each.n)


def _weight_gradient(each: PlannedMatmul) -> PlannedMatmul:
    return dataclasses.replace(each, name=f"{each.name} dw", m=each.k, k=each.m, out=4)


def _core(layer: LayerKind, layout: Layout) -> tuple[list[Operation], list[Operation]]:
    mixer = layer.mixer
    rows, heads = layout.micro_rows, mixer.num_q_heads / layout.mesh.tensor
    if layout.traits.fused_attention:
        flops = (
            rows * attention_flops(mixer, layout.length) / layout.mesh.tensor / layout.mesh.context
        )
        if layout.mesh.context > 1 and isinstance(mixer, RecurrentConfig):
            # Once more for chunks' states, and for what keeps them.
            flops *= 3 if isinstance(mixer, GatedDeltaConfig) else 2
        width = mixer.head_dim
        length = layout.length // layout.mesh.context
        forward: list[Operation] = [Core("attention", flops, width, length, False)]
        backward: list[Operation] = [Core("attention gradient", 2.5 * flops, width, length, True)]
        if layout.mesh.context > 1:
            for found, sent in zip(
                (forward, backward), _context_exchange(layer, layout), strict=True
            ):
                found.append(sent)
        if (indexer := active_indexer(layer, layout)) is not None:
            # Every device of a tensor axis chooses for itself.
            count = rows * indexer.num_heads
            scores = PlannedMatmul("index scores", length, length, indexer.head_dim, count)
            forward.append(scores)
        return forward, backward
    length = layout.length
    count = rows * heads
    width = mixer.value_width / mixer.num_q_heads
    scores = float(count * length * length // layout.mesh.context)
    dropout = 5 * scores if layout.traits.dropout else 0.0
    scale = length / layout.mesh.context
    forward = [
        PlannedMatmul("scores", scale, length, mixer.head_dim, count),
        MemoryPass("softmax", 4 * scores + dropout),
        PlannedMatmul("values", scale, width, length, count),
    ]
    backward = [
        PlannedMatmul("values dp", scale, length, width, count),
        PlannedMatmul("values dv", length, width, scale, count),
        MemoryPass("softmax gradient", 6 * scores + dropout),
        PlannedMatmul("scores dq", scale, mixer.head_dim, length, count),
        PlannedMatmul("scores dk", length, mixer.head_dim, scale, count),
    ]
    return forward, backward


def active_indexer(layer: LayerKind, layout: Layout) -> IndexerConfig | None:
    """Returns the layer's indexer; None where sequences are too short for it to leave keys out."""
    indexer = indexer_of(layer.mixer)
    return None if indexer is None or indexer.top_k >= layout.length else indexer


def _context_exchange(layer: LayerKind, layout: Layout) -> tuple[PlannedCollective, ...]:
    """Lists exchanges of a pass and its gradients: keys and values in a ring, or whole latents."""
    mixer, num_shards = layer.mixer, layout.mesh.context
    if isinstance(mixer, RecurrentConfig):
        return _states_exchange(layer, layout)
    latents = isinstance(mixer, LatentAttentionConfig)
    forward, backward = context_bytes(
        ContextMethod.ALL_GATHER if latents else ContextMethod.RING,
        num_shards=num_shards,
        tokens=layout.micro_tokens,
        q_width=mixer.score_width / layout.mesh.tensor,
        kv_width=mixer.cache.elements if latents else layer.kv_width_on(layout.mesh.tensor),
        itemsize=layout.activation_bytes,
        is_packed=True,
    )
    turns = num_shards - 1
    names = ("latents", "latent gradients") if latents else ("ring", "ring gradient")
    kinds = ("all-gather", "reduce-scatter") if latents else ("permute", "permute")
    # A gather's size is that of the whole array, of which a share is sent; a ring's that of a turn.
    share, form = (turns / num_shards, (False, 1)) if latents else (turns, (True, turns))
    each = zip(names, kinds, (forward / share, backward / share), strict=True)
    return tuple(PlannedCollective(name, kind, "context", size, *form) for name, kind, size in each)


def _states_exchange(layer: LayerKind, layout: Layout) -> tuple[PlannedCollective, ...]:
    """Lists exchanges of a pass and its gradients: chunks' states, and what keeps them."""
    elements, is_delta = 0, isinstance(layer.mixer, GatedDeltaConfig)
    for each in layer.mixer.cache.state:
        if each.name == "state":
            num_heads, key_width, value_width = each.shape
            kept = key_width if is_delta else 1
            elements += num_heads * key_width * (value_width + kept)
        else:
            elements += math.prod(each.shape)
    size = 2 * layout.mesh.context * layout.micro_rows * 4 * elements / layout.mesh.tensor
    kinds = (("states", "all-gather"), ("states gradient", "reduce-scatter"))
    return tuple(PlannedCollective(name, kind, "context", size) for name, kind in kinds)


def _memory(layer: LayerKind, layout: Layout) -> tuple[list[MemoryPass], list[MemoryPass]]:
    tokens, tensor = layout.micro_tokens, layout.mesh.tensor
    stream = tokens * layer.model_dim / (tensor if layout.sequence_parallel else 1)
    mixer = layer.mixer
    positions = tokens * (mixer.score_width / tensor + layer.kv_width_on(tensor) / 2)
    hidden, gated = tokens * layer.hidden_width / tensor, layer.is_gated
    mask, item = 1 if layout.traits.dropout else 0, layout.activation_bytes
    forward = [
        MemoryPass("norms", 2 * item * stream * layer.num_norms),
        MemoryPass("rotary", 2 * item * positions),
        MemoryPass("residual", item * (6 + mask) * stream),
        MemoryPass("activation", item * (3 if gated else 2) * hidden),
    ]
    backward = [
        MemoryPass("norms gradient", 4 * item * stream * layer.num_norms),
        MemoryPass("rotary gradient", 2 * item * positions),
        MemoryPass("residual gradient", item * (2 + 2 * mask) * stream),
        MemoryPass("activation gradient", item * (5 if gated else 3) * hidden),
    ]
    if layout.training_recipe.compute == "fp8":
        # Operands are read for their scale, read again, and written as rows and as columns.
        cast = 6.0 * (3 * stream + (mixer.value_width * tokens + hidden) / tensor)
        forward.append(MemoryPass("cast to fp8", cast))
        backward.append(MemoryPass("cast gradients to fp8", 2 * cast))
    return forward, backward


def _exchange(layer: LayerKind, layout: Layout) -> list[Operation]:
    """Sorting tokens by expert and back, and the all-to-alls between devices, whose buffers have
    the room that the run gives them. Tensor shards each exchange whole tokens.
    """
    experts = layer.feed_forward
    if not isinstance(experts, ExpertsConfig):
        return []
    copies = float(layout.micro_tokens) * experts.top_k * layer.model_dim
    moved = 2 * layout.activation_bytes * copies
    found: list[Operation] = [MemoryPass("sort by expert", moved), MemoryPass("combine", moved)]
    if layout.mesh.expert > 1:
        for axis, sent in exchange_bytes(experts, layout, layer.model_dim).items():
            send = functools.partial(PlannedCollective, kind="all-to-all", axis=axis)
            found.append(send("rows", size=sent["rows"] / 2, count=2))
            found.append(send(_CHOICES, size=sent["experts"]))
            found.append(send("weights of choices", size=sent["weights"]))
    return found


_CHOICES = "choices"  # whole numbers, which have no gradient


def exchange_bytes(
    experts: ExpertsConfig, layout: Layout, model_dim: int
) -> dict[str, dict[str, int]]:
    """Returns bytes that an exchange of expert tokens sends between and within nodes."""
    room = buffer_sizes(
        layout.micro_tokens,
        num_devices=layout.mesh.expert,
        experts=experts,
        exchange=layout.exchange,
    )
    itemsize = int(layout.activation_bytes)
    return {
        axis: exchanged_bytes(level, model_dim=model_dim, itemsize=itemsize, top_k=experts.top_k)
        for axis, level in zip((EXPERT, NODES), reversed(room.levels), strict=False)
    }


def _tensor(
    layer: LayerKind, layout: Layout
) -> tuple[list[PlannedCollective], list[PlannedCollective]]:
    if layout.mesh.tensor == 1:
        return [], []
    size = layout.activation_bytes * layout.micro_tokens * layer.model_dim
    reduce = functools.partial(
        PlannedCollective, axis="tensor", size=size, hidden=layout.traits.overlaps_tensor
    )
    if layout.sequence_parallel:
        both = [
            reduce("gather", "all-gather", count=2),
            reduce("scatter", "reduce-scatter", count=2),
        ]
        # Gathered inputs are not kept: the weight gradients gather them again.
        return both, [
            *both,
            dataclasses.replace(both[0], name="gather again", hidden=True),
        ]
    # An input gradient's sum runs beside the matmul of the weight's gradient.
    return [reduce("reduce", "all-reduce", count=2)], [
        reduce("reduce gradient", "all-reduce", count=2, hidden=layout.traits.overlap)
    ]


def saved_bytes(layer: LayerKind, layout: Layout, *, remat: Remat | None = None) -> float:
    """Returns bytes that one layer and micro-batch keep on a device from forward to backward.

    Unfused attention without recomputation keeps sbh (10 + 24/t + 5as/(ht)), with sequence
    parallelism sbh (34/t + 5as/(ht)) (arXiv 2205.05198, equations 2 and 4). Otherwise the sum is
    over tensors that the backward pass reads and does not recompute, 2 bytes per element.

    Args:
        remat: recomputation policy in place of the layout's.
    """
    remat = remat or layout.remat
    tokens, tensor, item = layout.micro_tokens, layout.mesh.tensor, layout.activation_bytes
    stream = item * tokens * layer.model_dim / (tensor if layout.sequence_parallel else 1)
    if remat is Remat.FULL:
        return stream
    mixer = layer.mixer
    core = tokens * (item * mixer.value_width + 4 * mixer.num_q_heads) / tensor
    if active_indexer(layer, layout) is not None:
        core += item * tokens * layout.length  # which keys each query attends to
    if remat is Remat.NAMED:
        return stream + core
    if not layout.traits.fused_attention:
        return _megatron_saved(layer, layout)
    hidden, gated = tokens * layer.hidden_width / tensor, layer.is_gated
    rotated = tokens * (mixer.score_width / tensor + layer.kv_width_on(tensor) / 2)
    inward = item * tokens * (mixer.score_width / tensor + layer.kv_width_on(tensor))
    inward += _quantized_inputs(layer, layout)
    # Outputs of the projections back into the stream are whole on every device of the axis.
    if remat is Remat.MLP:
        return stream + core + inward + 2 * stream
    dots = inward + 2 * stream + item * hidden * (2 if gated else 1)
    if remat is Remat.DOTS:
        return stream + core + dots
    if not layout.traits.saves_fp32:
        return stream + core + dots + layer.num_norms * stream + item * hidden
    # Nothing recomputed: each norm's fp32 quotient and its output; the rotated queries and keys;
    # of the activation the fp32 inputs, the sigmoid or its like, the fp32 and the final output.
    fp32 = 18.0 if gated else 14.0
    return stream + core + dots + 3 * layer.num_norms * stream + 2 * rotated + fp32 * hidden


def _quantized_inputs(layer: LayerKind, layout: Layout) -> float:
    """Returns bytes of the projections' 8-bit inputs, which gradients of the weights read."""
    if layout.training_recipe.compute != "fp8":
        return 0.0
    tokens, tensor = float(layout.micro_tokens), layout.mesh.tensor
    stream = tokens * layer.model_dim / (tensor if layout.sequence_parallel else 1)
    attention = stream + tokens * layer.mixer.value_width / tensor
    if isinstance(layer.feed_forward, ExpertsConfig):  # 16 bits unless asked for
        return attention
    return attention + stream + tokens * layer.hidden_width / tensor


def _megatron_saved(layer: LayerKind, layout: Layout) -> float:
    tensor = layout.mesh.tensor
    stream = float(layout.micro_tokens) * layer.model_dim
    scores = 5.0 * layer.mixer.num_q_heads * layout.length / (layer.model_dim * tensor)
    if layout.traits.recomputes_scores:
        scores = 0.0
    if layout.sequence_parallel:
        return stream * (34 / tensor + scores)
    return stream * (10 + 24 / tensor + scores)


def embedding_operations(model: PlannedModel, layout: Layout) -> Iterator[Operation]:
    """Lists a micro-batch's embedding lookup and the scatter of its gradient."""
    tokens = float(layout.micro_tokens)
    yield MemoryPass("lookup", (4 + layout.activation_bytes) * tokens * model.config.model_dim)
    yield MemoryPass("scatter", 12.0 * tokens * model.config.model_dim)
    if layout.mesh.tensor > 1:
        size = layout.activation_bytes * tokens * model.config.model_dim
        yield PlannedCollective("lookup", "all-reduce", "tensor", size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossForm:
    """The loss's implementation on one device, kernel or XLA, and its number of chunks."""

    kernel: bool  # stores bf16 exponentials; else XLA stores fp32 logits and a 16-bit gradient
    chunks: int
    chunk_bytes: float  # of the part of [tokens, vocabulary ids] in memory at a time


def loss_form(model: PlannedModel, layout: Layout) -> LossForm:
    """Returns whether the loss runs as a kernel or by XLA on a device, and in how many chunks."""
    tokens, vocab, ids = (
        layout.micro_tokens,
        model.config.vocab_size,
        model.config.vocab_size // layout.mesh.tensor,
    )
    if not layout.traits.fused_loss:
        return LossForm(
            kernel=False, chunks=1, chunk_bytes=6.0 * tokens * vocab / layout.mesh.tensor
        )
    bf16 = layout.training_recipe.compute == "bf16"
    if layout.traits.loss_kernel and bf16 and ids >= HOPPER_LEAST_IDS:
        chunks = hopper_chunks(tokens=tokens, num_ids=ids)
        return LossForm(kernel=True, chunks=chunks.count, chunk_bytes=2.0 * chunks.length * ids)
    rows = layout.micro_rows
    chunks = xla_chunks(rows=rows, length=tokens // rows, num_ids=vocab, platform="gpu")
    size = 6.0 * rows * chunks.length * vocab / layout.mesh.tensor
    return LossForm(kernel=False, chunks=chunks.count, chunk_bytes=size)


def loss_operations(model: PlannedModel, layout: Layout) -> list[Operation]:
    """Lists one micro-batch's operations for logits and cross entropy, forward and backward."""
    form = loss_form(model, layout)
    tokens, tensor = float(layout.micro_tokens), layout.mesh.tensor
    width, vocab = model.config.model_dim, model.config.vocab_size / tensor
    logits = tokens * vocab
    found: list[Operation] = [
        PlannedMatmul("logits", tokens, vocab, width, out=2 if form.kernel else 4),
        PlannedMatmul("logits dx", tokens, width, vocab, out=4),
        PlannedMatmul("logits dw", width, vocab, tokens, out=4),
    ]
    if form.kernel:
        # The table's fp32 gradient, read and written by each chunk but the first; a row of it and
        # one of the table for each target.
        again = 8.0 * vocab * width * (form.chunks - 1)
        found.append(MemoryPass("cross entropy", again + 12.0 * tokens * width))
    else:
        # fp32 logits: read for the maximum and the sum, read again and written as 16-bit gradient.
        found.append(MemoryPass("cross entropy", 10.0 * logits))
    if tensor > 1:
        item = 4.0 if layout.traits.fused_loss else layout.activation_bytes
        found += _collectives(form, tokens=tokens, width=width, item=item)
    return found


def _collectives(form: LossForm, *, tokens: float, width: int, item: float) -> list[Operation]:
    """Lists the loss's collectives over the axis that splits the vocabulary."""
    if form.kernel:
        # Three numbers for the target's logit, a maximum, a sum; dx whole, in 16 bits.
        return [
            PlannedCollective("logits dx", "all-reduce", "tensor", 2.0 * tokens * width),
            PlannedCollective(
                "logits",
                "all-reduce",
                "tensor",
                4.0 * tokens * 5 / 3 / form.chunks,
                count=3 * form.chunks,
            ),
        ]
    # Each chunk sums its dx in fp32, after its maxima and its sums of exponentials.
    size = item * tokens * width / form.chunks
    return [
        PlannedCollective("logits dx", "all-reduce", "tensor", size, count=form.chunks),
        PlannedCollective(
            "logits", "all-reduce", "tensor", 4.0 * tokens / form.chunks, count=2 * form.chunks
        ),
    ]
