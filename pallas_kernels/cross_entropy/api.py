"""Public function of the vocabulary loss: it validates a call and chooses the chunk size.

Dims: B batch, T position, D model width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.chosen import choose
from pallas_kernels.common.errors import InputError, UnsupportedError

from . import hopper, xla
from .chunked import Static, chunked_loss
from .reference import linear_cross_entropy_reference

# fp32 logits of one chunk. On accelerators large enough for matmuls at full rate and small beside a
# model's weights; on a CPU small enough for its caches (4096 tokens x 4096 ids, gradient of both
# inputs: 2 MiB chunks took a quarter of the time of one chunk).
_XLA_BYTES = {"cpu": 2**21}
_XLA_ACCELERATOR_BYTES = 2**30
# bf16 exponentials. With the table in bf16, 16,384 tokens of 128,256 ids stay under 1 GiB.
_HOPPER_BYTES = 470 * 2**20

HOPPER_LEAST_IDS = 100_000
"""Least rows of this device's table for which "auto" takes the Hopper kernel: 1.18 times as fast at
128,256 ids, width 2048 and 16,384 tokens (experiments/results/linear-cross-entropy-h200.json)."""


class CrossEntropySums(NamedTuple):
    """Weighted sums of the loss over tokens, fp32: the differentiable total, and the plain nll."""

    total: jax.Array  # sum of weight * (smoothed nll + z_loss * lse^2)
    nll: jax.Array  # sum of weight * nll, nats, not smoothed; carries no gradient


def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    implementation: str = "auto",
    chunk_bytes: int | None = None,
    batch_shards: int = 1,
    sequence_shards: int = 1,
    num_devices: int = 1,
    vocabulary_axes: tuple[str, ...] = (),
) -> CrossEntropySums:
    """Computes weighted cross entropy between logits ``hidden table^T`` and targets, in chunks.

    Besides inputs and gradients, only one chunk of logits is in memory. A loss of full logits would
    keep B*T*V fp32 values and their gradient.

    Args:
        hidden: [B, T, D], bf16, fp16 or fp32; matmul operands have its dtype, sums are fp32.
        table: [V, D], any float dtype; its gradient is summed in fp32.
        targets: int [B, T], in [0, V); for a target outside, nll is lse: give it weight 0.
        weights: float32 [B, T], of each token's loss; not differentiated.
        z_loss: weight of lse^2 (PaLM, arXiv 2204.02311, section 5).
        logit_soft_cap: logits become cap * tanh(logits / cap) (Gemma-2).
        label_smoothing: s in [0, 1): the target has probability 1 - s, and s is spread evenly over
            all ids, the target's too (arXiv 1512.00567, section 7).
        implementation: "xla" computes fp32 logits in chunks, "hopper" (Mosaic GPU) bf16
            exponentials in chunks, "reference" all logits at once. "auto" takes "hopper" for
            supported calls with 100,000 ids or more, where it was measured 1.15 times as fast, else
            "xla".
        chunk_bytes: most bytes of a chunk's logits per shard (fp32; bf16 for "hopper"); by default
            2 MiB on a CPU, elsewhere 1 GiB ("hopper" 470 MiB).
        batch_shards: number of shards of the batch dim. The table's gradient is summed per shard,
            so that it is communicated once, not once per chunk.
        sequence_shards: number of shards of the positions dim; sums are per shard here, too.
        num_devices: number of devices that the call is partitioned over; "hopper" needs 1.
        vocabulary_axes: mesh axes that shard the vocabulary evenly, for a call inside
            ``shard_map``. Then ``table`` is this device's shard [V/N, D]; hidden, weights and
            targets (ids of the whole vocabulary) are replicated. Results and hidden's gradient are
            partial sums: add them over the axes.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the named implementation cannot compute this call.
    """
    _check(
        hidden, table, targets, weights,
        batch_shards=batch_shards, sequence_shards=sequence_shards, label_smoothing=label_smoothing,
    )  # fmt: skip
    if implementation == "reference":
        if vocabulary_axes:
            raise UnsupportedError(
                f"the reference has no vocabulary_axes={vocabulary_axes}: it is of a whole table; "
                "implementation='xla' can"
            )
        sums = linear_cross_entropy_reference(
            hidden, table, targets, weights,
            z_loss=z_loss, logit_soft_cap=logit_soft_cap, label_smoothing=label_smoothing,
        )  # fmt: skip
        return CrossEntropySums(*sums)
    vocab = table.shape[0]
    is_small = implementation == "auto" and vocab < HOPPER_LEAST_IDS
    chosen = choose(
        "cross entropy", "xla" if is_small else implementation, ("hopper", "xla", "reference"),
        lambda: hopper.unsupported(
            hidden, num_devices=max(num_devices, batch_shards * sequence_shards),
            label_smoothing=label_smoothing, logit_soft_cap=logit_soft_cap,
        ),
    )  # fmt: skip
    if chosen == "hopper":
        # It runs on one device: one row of tokens, so that a chunk is a slice and not a copy.
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        targets, weights = targets.reshape(1, -1), weights.reshape(1, -1)
    rows, length = hidden.shape[0] // batch_shards, hidden.shape[1] // sequence_shards
    static = Static(
        chunk_loss=xla.chunk_loss,
        chunk_length=_chunk_length(chosen, rows, length, vocab, chunk_bytes),
        batch_shards=batch_shards,
        sequence_shards=sequence_shards,
        num_ids=vocab,
        z_loss=z_loss,
        logit_soft_cap=logit_soft_cap,
        label_smoothing=label_smoothing,
        vocabulary_axes=vocabulary_axes,
    )
    if vocabulary_axes:
        static = static._replace(num_vocabulary_shards=jax.lax.axis_size(vocabulary_axes))
        targets = targets - jax.lax.axis_index(vocabulary_axes) * vocab
    if chosen == "hopper":
        static = static._replace(
            chunk_loss=hopper.chunk_loss,
            table_multiple=hopper.TABLE_MULTIPLE,
            first_apart=True,
            uniform_apart=label_smoothing > 0.0,
        )
    return CrossEntropySums(*chunked_loss(static, hidden, table, targets, weights))


def _check(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    batch_shards: int,
    sequence_shards: int,
    label_smoothing: float,
) -> None:
    """Raises InputError unless the arguments agree."""
    batch, length, width = hidden.shape
    if table.ndim != 2 or table.shape[1] != width:
        raise InputError(
            f"table has shape {table.shape}; hidden's width {width} asks for [V, {width}]"
        )
    for name, array in (("targets", targets), ("weights", weights)):
        if array.shape != (batch, length):
            raise InputError(f"{name} has shape {array.shape}; hidden asks for {(batch, length)}")
    if batch_shards < 1 or batch % batch_shards:
        raise InputError(
            f"batch_shards={batch_shards} does not divide a batch of {batch}; shards are equal"
        )
    if sequence_shards < 1 or length % sequence_shards:
        raise InputError(
            f"sequence_shards={sequence_shards} does not divide a sequence of {length}; shards are "
            "equal"
        )
    if weights.dtype != jnp.float32:
        raise InputError(f"weights are {weights.dtype}; they must be float32, as the sums are")
    if not 0.0 <= label_smoothing < 1.0:
        raise InputError(f"label_smoothing={label_smoothing} must be at least 0 and below 1")


class Chunks(NamedTuple):
    """Length and number of chunks into which token positions are cut."""

    length: int  # positions per chunk; the last (or first) chunk may have fewer
    count: int


def xla_chunks(
    *, rows: int, length: int, num_ids: int, platform: str, chunk_bytes: int | None = None
) -> Chunks:
    """Returns the fewest chunks of equal length whose fp32 logits fit the bound.

    Args:
        rows, length: sequences and positions per shard. num_ids: rows of this device's table.
        platform: JAX platform, such as "cpu" or "gpu", that decides the default bound.
        chunk_bytes: bound on the bytes of a chunk's logits; None takes the platform's.
    """
    chunk_bytes = chunk_bytes or _XLA_BYTES.get(platform, _XLA_ACCELERATOR_BYTES)
    wanted = min(max(-(-rows * length * num_ids * 4 // chunk_bytes), 1), length)
    size = -(-length // wanted)
    return Chunks(size, -(-length // size))


def hopper_chunks(*, tokens: int, num_ids: int, chunk_bytes: int | None = None) -> Chunks:
    """Returns chunks of tokens whose bf16 exponentials fit the bound, of whole tiles if one fits.

    Args:
        num_ids: number of rows of the device's own table.
    """
    most = max((chunk_bytes or _HOPPER_BYTES) // (2 * num_ids), 1)
    if most > hopper.ROW_TILE:
        most -= most % hopper.ROW_TILE
    size = min(most, tokens)
    return Chunks(size, -(-tokens // size))


def _chunk_length(
    chosen: str, rows: int, length: int, num_ids: int, chunk_bytes: int | None
) -> int:
    if chosen == "hopper":
        return hopper_chunks(tokens=length, num_ids=num_ids, chunk_bytes=chunk_bytes).length
    # A planner traces for another device than its own.
    platform = "gpu" if device.target().is_gpu else jax.default_backend()
    return xla_chunks(
        rows=rows, length=length, num_ids=num_ids, platform=platform, chunk_bytes=chunk_bytes
    ).length
