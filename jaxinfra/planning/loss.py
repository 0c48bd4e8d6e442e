"""The loss of one micro-batch on one device: its chunks, operations and buffers.

The form is the one that ``linear_cross_entropy`` takes on a Hopper GPU: its kernel where a device
has enough ids, in bf16; else fp32 logits by XLA.
"""

import dataclasses

from jaxinfra.ops.cross_entropy import HOPPER_LEAST_IDS, hopper_chunks, xla_chunks
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import PlannedModel
from jaxinfra.planning.operations import MemoryPass, Operation, PlannedCollective, PlannedMatmul


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossForm:
    """How a device gets through its tokens."""

    kernel: bool  # bf16 exponentials; else fp32 logits and their 16-bit gradient
    chunks: int
    chunk_bytes: float  # what of [tokens, ids] lives at a time


def loss_form(model: PlannedModel, layout: Layout) -> LossForm:
    """Which form the loss takes, and in how many chunks."""
    tokens, vocab, ids = (
        layout.micro_tokens,
        model.config.vocab_size,
        model.config.vocab_size // layout.mesh.tensor,
    )
    if not layout.traits.fused_loss:
        return LossForm(
            kernel=False, chunks=1, chunk_bytes=6.0 * tokens * vocab / layout.mesh.tensor
        )
    bf16 = layout.bytes_a_parameter.compute == "bf16"
    if layout.traits.loss_kernel and bf16 and ids >= HOPPER_LEAST_IDS:
        chunks = hopper_chunks(tokens=tokens, num_ids=ids)
        return LossForm(kernel=True, chunks=chunks.count, chunk_bytes=2.0 * chunks.length * ids)
    rows = layout.micro_rows
    chunks = xla_chunks(rows=rows, length=tokens // rows, num_ids=vocab, platform="gpu")
    size = 6.0 * rows * chunks.length * vocab / layout.mesh.tensor
    return LossForm(kernel=False, chunks=chunks.count, chunk_bytes=size)


def loss_operations(model: PlannedModel, layout: Layout) -> list[Operation]:
    """Logits, their gradients and the cross entropy of one micro-batch, forward and backward."""
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
    """Over the axis that splits the vocabulary: numbers of each token, and dx."""
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
