"""What the compiled training step of this code base communicates, array by array.

The rules are those of ``parallel/``: layers' weights are gathered where they are used, gradients
summed where they are sharded or once after the last micro-batch, rows of tables exchanged. Sizes
are of one device's result, as a compiled program lists them. XLA's CPU backend has no
reduce-scatter of its own making: it writes an all-reduce and keeps a part.

Letters: B rows of a micro-batch on one device, T positions, D model width, V vocabulary.
"""

import math

from jaxinfra.core import axes
from jaxinfra.planning.communication_call import Call, Step
from jaxinfra.planning.communication_streams import (
    lookup_calls,
    loss_calls,
    ring_calls,
    tensor_calls,
)
from jaxinfra.planning.operations import TENSOR_DIMS
from jaxinfra.planning.shapes import ModelShape, Weight


def communication(shape: ModelShape, step: Step) -> list[Call]:
    """Every collective of one step; MoE and pipelines are not part of this program yet."""
    found: list[Call] = []
    for weight in shape.weights():
        found += _gathers(shape, step, weight)
        found += _gradients(shape, step, weight)
        found += _updates(step, weight)
    found += lookup_calls(shape, step)
    found += tensor_calls(shape, step)
    found += loss_calls(shape, step)
    found += ring_calls(shape, step)
    found += _scalars(shape, step)
    return [each for each in found if each.times]


def _size(dim: str | None, size: int, step: Step, *, gathered: bool) -> int:
    if dim in TENSOR_DIMS:
        return size // step.tensor
    if dim == axes.EMBED and not gathered:
        return size // step.fsdp
    return size


def _shape(weight: Weight, step: Step, *, gathered: bool) -> tuple[int, ...]:
    return tuple(_size(dim, size, step, gathered=gathered) for dim, size in weight.dims)


def _has_embed(weight: Weight) -> bool:
    return any(dim == axes.EMBED for dim, _ in weight.dims)


def _is_table(weight: Weight) -> bool:
    return weight.name in ("embedding", "unembedding", "positions")


def _in_loop(weight: Weight) -> bool:
    """Whether it belongs to the scanned layers."""
    return not _is_table(weight) and not weight.name.startswith("final_norm")


def _gathers(shape: ModelShape, step: Step, weight: Weight) -> list[Call]:
    """Fully sharded weights, whole over fsdp where they are used."""
    if step.zero < 3 or step.fsdp == 1 or not _has_embed(weight):
        return []
    micro = step.accumulation
    full = _shape(weight, step, gathered=True)

    def call(times: int, reason: str) -> Call:
        return Call(
            kind="all-gather",
            dtype="f32",
            shape=full,
            times=times,
            reason=f"{weight.name} {reason}",
        )

    if _in_loop(weight):
        layers = weight.copies * micro
        found = [call(layers, "forward")]
        if not weight.name.endswith("/bias"):
            found.append(call(layers, "backward"))
        if not weight.matmul and step.recomputes and weight.name.endswith("/scale"):
            found.append(call(layers, "recomputed"))
        return found
    if weight.name.startswith("final_norm"):
        # The same in every micro-batch: moved out of their loop.
        found = [call(1, "forward")]
        return found if weight.name.endswith("/bias") else [*found, call(1, "backward")]
    if weight.name == "unembedding" or (weight.name == "embedding" and shape.tie_embeddings):
        found = [call(1, "logits")]
        # Seen of XLA 0.11.2: with the vocabulary split too, the same gather twice.
        once = step.loss_chunks(shape.vocab_size)[0] == 1
        if once and step.tensor > 1 and step.replica * step.fsdp > 2:
            found.append(call(1, "logits, a second time"))
        return found
    return []


def _gradients(shape: ModelShape, step: Step, weight: Weight) -> list[Call]:
    """Sums over the data axes, in the loops or after them."""
    micro = step.accumulation
    per_step = weight.copies * micro if _in_loop(weight) else micro
    found: list[Call] = []
    if weight.name in ("embedding", "positions"):
        # Rows' gradients come back through the all-to-all; over fsdp there is nothing to sum.
        lookup = _table_gradient(shape, step, weight)
        if weight.name == "positions" or not shape.tie_embeddings:
            return lookup + _last(shape, step, weight)
        found += lookup
    return found + _inside(step, weight, per_step) + _last(shape, step, weight)


def _inside(step: Step, weight: Weight, times: int) -> list[Call]:
    """Sums where they are taken: in every layer and micro-batch, unless they wait for the last.

    Rows and positions are summed apart. A layer's matrix that is sharded is summed over the axis
    that shards it, and its shard over the others.
    """
    fsdp = 1 if step.zero == 1 else step.fsdp
    replica = 1 if step.last_replica else step.replica
    scattered = fsdp if step.zero >= 2 and _has_embed(weight) else 1
    # Each head's norm sees the heads of one device of the tensor axis.
    heads = step.tensor if weight.name.endswith(("query_norm", "key_norm")) else 1
    full, part = _shape(weight, step, gathered=True), _shape(weight, step, gathered=False)

    def call(shape: tuple[int, ...], over: str) -> Call:
        return Call(
            kind="all-reduce",
            dtype="f32",
            shape=shape,
            times=times,
            reason=f"{weight.name} gradient over {over}",
        )

    rows = fsdp * replica * heads
    if weight.matmul and _in_loop(weight) and scattered > 1:
        others = replica * step.context
        return [call(full, "fsdp")] + ([call(part, "replica and context")] if others > 1 else [])
    if _is_table(weight):
        # The loss adds rows and positions of its chunks up by device first.
        return [call(full, "the data axes")] if rows * step.context > 1 else []
    found = [call(full, "rows")] if rows > 1 else []
    return found + ([call(full, "positions")] if step.context > 1 else [])


def _table_gradient(shape: ModelShape, step: Step, weight: Weight) -> list[Call]:
    del shape
    by_width = step.zero >= 3 and step.fsdp > 1
    others = (1 if step.last_replica else step.replica) * step.context
    if not by_width:
        others *= 1 if step.zero == 1 and step.fsdp > 1 else step.fsdp
    if others == 1:
        return []
    return [
        Call(
            kind="all-reduce",
            dtype="f32",
            shape=_shape(weight, step, gathered=not by_width),
            times=step.accumulation,
            reason=f"{weight.name} gradient of rows",
        )
    ]


def _stacked(weight: Weight, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (weight.copies, *shape) if _in_loop(weight) else shape


def _last(shape: ModelShape, step: Step, weight: Weight) -> list[Call]:
    """Sums after the last micro-batch, whole stacks of layers at a time."""
    del shape
    found: list[Call] = []
    scattered = step.zero == 1 and step.fsdp > 1
    if scattered:
        found.append(
            Call(
                kind="reduce-scatter" if _has_embed(weight) else "all-reduce",
                dtype="f32",
                shape=_stacked(weight, _shape(weight, step, gathered=False)),
                times=1,
                reason=f"{weight.name} gradient, after the last micro-batch",
            )
        )
    if step.last_replica and (_has_embed(weight) or not scattered):
        part = step.fsdp > 1
        found.append(
            Call(
                kind="all-reduce",
                dtype="f32",
                shape=_stacked(weight, _shape(weight, step, gathered=not part)),
                times=1,
                reason=f"{weight.name} gradient over replica, after the last micro-batch",
            )
        )
    return found


def _updates(step: Step, weight: Weight) -> list[Call]:
    """ZeRO 1 and 2: each device updates its share, then all gather the new weights."""
    if step.zero == 3 or step.fsdp == 1 or not _has_embed(weight):
        return []
    return [
        Call(
            kind="all-gather",
            dtype="f32",
            shape=_stacked(weight, _shape(weight, step, gathered=True)),
            times=1,
            reason=f"{weight.name} after the update",
        )
    ]


def _scalars(shape: ModelShape, step: Step) -> list[Call]:
    """Squares of gradient norms, twice (reported, and clipped by), and the loss's sums."""
    sharded = 0
    for weight in shape.weights():
        names = {dim for dim, _ in weight.dims}
        sharded += (step.fsdp > 1 and axes.EMBED in names) + (
            step.tensor > 1 and bool(names & TENSOR_DIMS)
        )

    def scalar(times: int, reason: str) -> Call:
        return Call(kind="all-reduce", dtype="f32", shape=(), times=times, reason=reason)

    found = [scalar(1, "norm of a sharded gradient") for _ in range(2 * sharded)]
    if step.replica * step.fsdp * step.context > 1:
        for _ in range((step.replica * step.fsdp > 1) + (step.context > 1)):
            found += [scalar(1, "targets counted"), scalar(1, "tokens reported")]
        inside = step.context * (1 if step.last_replica else step.replica)
        inside *= 1 if step.zero == 1 and step.fsdp > 1 else step.fsdp
        if inside > 1:
            found.append(scalar(step.accumulation, "loss"))
        if step.gradient_last:
            found.append(scalar(1, "loss, after the last micro-batch"))
    return found


def argument_bytes(shape: ModelShape, step: Step) -> dict[str, int]:
    """Bytes of the step's arguments on one device: fp32 weights, two moments, counters, a batch."""
    weights = moments = 0
    for weight in shape.weights():
        part = math.prod(_shape(weight, step, gathered=False)) * weight.copies
        full = math.prod(_shape(weight, step, gathered=True)) * weight.copies
        weights += 4 * (part if step.zero == 3 else full)
        moments += 8 * part
    tokens = step.local_rows * step.accumulation * step.length // step.context
    return {
        "weights": weights,
        "moments": moments,
        # step, skipped, skipped in a row, the loss scale's two, Adam's and the schedule's counts,
        # and a key of two words.
        "counters": 4 * 9,
        "batch": 5 * 4 * tokens,
    }
