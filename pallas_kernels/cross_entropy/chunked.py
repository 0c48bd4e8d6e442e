"""Vocabulary loss chunked over positions: a chunk's logits live only while its gradient is formed.

The loss is a sum, so its gradient is known up to one scalar as soon as the logits are. The forward
pass of a differentiated call computes both gradients chunk by chunk; the backward pass only scales
them. This takes three matmuls instead of four and keeps no logits.

Tokens may be sharded over devices. Every chunk takes equally many tokens of each shard, and sums
over tokens are kept per shard until the last chunk. A single sum would be all-reduced in every
iteration of the loop, which for the table's gradient means once per chunk.

A last chunk that is not full is padded. ``first_apart`` instead computes the remainder, or one
chunk, before the loop: more code, but no matmul is wasted and the table's gradient starts as a
product instead of zeros.

The vocabulary may be sharded over mesh axes (``vocabulary_axes``, inside ``shard_map``): a device
then has a shard of the table's rows. Devices exchange a few numbers per token, never logits.

Dims: B batch, T position, Z shard of the batch times shard of the positions, b row within a shard,
C position within a chunk, D model width, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32


class ChunkLoss(NamedTuple):
    """Loss sums of one chunk per shard of tokens, and optionally the gradient by raw logits.

    The gradient of the total is ``scale * slope + coefficient * [v = target] + uniform``. Where
    None, scale is 1, coefficient and uniform are 0. With a ``uniform``, the total lacks
    ``uniform * sum of the logits``: the caller adds it from the sum of the table's rows.
    """

    total_Z: jax.Array
    nll_Z: jax.Array
    slope_ZbCV: jax.Array | None = None  # hidden's dtype
    scale_ZbC: jax.Array | None = None  # fp32
    coefficient_ZbC: jax.Array | None = None  # fp32, 0 for a target outside the table
    uniform_ZbC: jax.Array | None = None  # fp32


class Static(NamedTuple):
    """The static part of a chunked loss call: sizes, shards, options and the chunk's function.

    ``chunk_loss`` is (static, table, hidden, targets, weights, *, with_gradient) -> ChunkLoss.
    """

    chunk_loss: Callable[..., ChunkLoss]
    chunk_length: int
    batch_shards: int
    sequence_shards: int
    num_ids: int  # rows of this device's table, before padding
    z_loss: float
    logit_soft_cap: float | None
    label_smoothing: float = 0.0
    vocabulary_axes: tuple[str, ...] = ()  # mesh axes that shard the table's rows evenly
    num_vocabulary_shards: int = 1  # devices along ``vocabulary_axes``
    table_multiple: int = 1  # the table is padded with rows of zeros to a multiple of it
    first_apart: bool = False  # computes the remainder, or one chunk, before the loop
    uniform_apart: bool = False  # ``chunk_loss`` returns a ``uniform``

    @property
    def num_shards(self) -> int:
        """Number of shards of the tokens; each has its own sums."""
        return self.batch_shards * self.sequence_shards

    @property
    def num_ids_of_all(self) -> int:
        """Number of rows of the table in all shards of the vocabulary together."""
        return self.num_ids * self.num_vocabulary_shards


def over_shards(static: Static, x: jax.Array, reduce: Callable) -> jax.Array:
    """Reduces x over the shards of the vocabulary; returns x unchanged if it is not sharded."""
    return reduce(x, static.vocabulary_axes) if static.vocabulary_axes else x


def logsumexp(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Computes the logsumexp of x over the devices along mesh axes."""
    largest = jax.lax.pmax(x, axes)
    return largest + jnp.log(jax.lax.psum(jnp.exp(x - largest), axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_loss(
    static: Static,
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the loss sums (total, nll), ``chunk_length`` positions per shard at a time.

    The last chunk is padded. The nll carries no gradient. The table's gradient is summed in fp32. B
    must be a multiple of ``batch_shards``, T of ``sequence_shards``. Where the vocabulary is
    sharded, targets count from the shard's first id; the sums and hidden's gradient are partial.
    """
    table = _operand(static, table_VD, like=hidden_BTD)
    row_sum_111D = _row_sum(static, table)

    def chunk(sums, operands):
        loss = static.chunk_loss(static, table, *operands, with_gradient=False)
        total_Z = loss.total_Z + _uniform_total(static, loss, operands[0], row_sum_111D)
        return (sums[0] + total_Z, sums[1] + loss.nll_Z), None

    zero_Z = jnp.zeros(static.num_shards, jnp.float32)
    (total_Z, nll_Z), _ = _scan(static, chunk, (zero_Z, zero_Z), hidden_BTD, targets_BT, weights_BT)
    return _part(static, total_Z), _part(static, nll_Z)


def _part(static: Static, sum_Z: jax.Array) -> jax.Array:
    """Returns this device's share of a sum that all devices with parts of the vocabulary hold."""
    return jnp.sum(sum_Z) / static.num_vocabulary_shards


def _forward(static, hidden_BTD, table_VD, targets_BT, weights_BT):
    table = _operand(static, table_VD, like=hidden_BTD)
    row_sum_111D = _row_sum(static, table)

    def chunk(sums, operands):
        loss = static.chunk_loss(static, table, *operands, with_gradient=True)
        total_Z = loss.total_Z + _uniform_total(static, loss, operands[0], row_sum_111D)
        d_table_ZVD, d_hidden_ZbCD = _products(static, loss, table, operands, sums[2])
        d_rows_ZD = sums[3]
        if loss.uniform_ZbC is not None:
            uniform_ZbC1 = loss.uniform_ZbC[..., None]
            d_hidden_ZbCD += uniform_ZbC1 * row_sum_111D
            d_rows_ZD = d_rows_ZD + jnp.sum(uniform_ZbC1 * operands[0].astype(jnp.float32), (1, 2))
        sums = (sums[0] + total_Z, sums[1] + loss.nll_Z, d_table_ZVD, d_rows_ZD)
        return sums, d_hidden_ZbCD.astype(operands[0].dtype)

    zero_Z = jnp.zeros(static.num_shards, jnp.float32)
    zero_ZVD = jnp.zeros((static.num_shards, *table.shape), jnp.float32)
    zero_ZD = jnp.zeros((static.num_shards, table.shape[1])) if static.uniform_apart else None
    start = (zero_Z, zero_Z, zero_ZVD, zero_ZD)
    (total_Z, nll_Z, d_table_ZVD, d_rows_ZD), d_hidden_ZbTD = _scan(
        static, chunk, start, hidden_BTD, targets_BT, weights_BT
    )
    d_hidden_BTD = _join(static, d_hidden_ZbTD, like=hidden_BTD)
    like = jnp.zeros((0,), table_VD.dtype)
    d_table_VD = jnp.sum(d_table_ZVD, axis=0)[: static.num_ids]
    if row_sum_111D is not None:
        d_table_VD += jnp.sum(d_rows_ZD, axis=0, keepdims=True)
    sums = _part(static, total_Z), _part(static, nll_Z)
    return sums, (d_hidden_BTD, d_table_VD, like, weights_BT)


def _products(
    static: Static,
    loss: ChunkLoss,
    table: jax.Array,
    operands: tuple[jax.Array, ...],
    d_table_ZVD: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The table's gradient, a chunk's added, and hidden's but for what is uniform; fp32."""
    hidden_ZbCD, slope_ZbCV = operands[0], loss.slope_ZbCV
    # On the narrow side of both products: the wide matrix is read as it was written.
    scaled_ZbCD, scale_ZbC1 = hidden_ZbCD, 1.0
    if loss.scale_ZbC is not None:
        scale_ZbC1 = loss.scale_ZbC[..., None]
        scaled_ZbCD = (scale_ZbC1 * hidden_ZbCD.astype(jnp.float32)).astype(hidden_ZbCD.dtype)
    d_table_ZVD = d_table_ZVD + einsum_f32("ZbCV,ZbCD->ZVD", slope_ZbCV, scaled_ZbCD)
    at_target_ZbCD = 0.0
    if loss.coefficient_ZbC is not None:
        ids_ZbC = jnp.clip(operands[1], 0, static.num_ids - 1)
        shards_Z11 = jnp.arange(static.num_shards)[:, None, None]
        coefficient_ZbC1 = loss.coefficient_ZbC[..., None]
        d_table_ZVD = d_table_ZVD.at[jnp.broadcast_to(shards_Z11, ids_ZbC.shape), ids_ZbC].add(
            coefficient_ZbC1 * hidden_ZbCD.astype(jnp.float32)
        )
        at_target_ZbCD = coefficient_ZbC1 * table[ids_ZbC].astype(jnp.float32)
    # One product after the other: what each needs besides is never in memory together.
    d_table_ZVD, slope_ZbCV = jax.lax.optimization_barrier((d_table_ZVD, slope_ZbCV))
    d_hidden_ZbCD = scale_ZbC1 * einsum_f32("ZbCV,VD->ZbCD", slope_ZbCV, table)
    return d_table_ZVD, d_hidden_ZbCD + at_target_ZbCD


def _backward(static, residuals, cotangents):
    del static
    d_hidden_BTD, d_table, like, weights_BT = residuals
    scale = cotangents[0]
    d_hidden = (scale * d_hidden_BTD.astype(jnp.float32)).astype(d_hidden_BTD.dtype)
    # Weights mark which targets count; they are data, not a path for gradients.
    return d_hidden, (scale * d_table).astype(like.dtype), None, jnp.zeros_like(weights_BT)


chunked_loss.defvjp(_forward, _backward)


def _row_sum(static: Static, table_VD: jax.Array) -> jax.Array | None:
    """Returns the sum of the table's rows [1, 1, 1, D], where label smoothing needs it."""
    if not static.uniform_apart:
        return None
    return jnp.sum(table_VD.astype(jnp.float32), axis=0)[None, None, None]


def _uniform_total(
    static: Static, loss: ChunkLoss, hidden_ZbCD: jax.Array, row_sum_111D: jax.Array | None
) -> jax.Array | float:
    """Returns the part of the total that a chunk's loss with ``uniform`` leaves out."""
    if loss.uniform_ZbC is None or row_sum_111D is None:
        return 0.0
    sum_ZbC = jnp.sum(hidden_ZbCD.astype(jnp.float32) * row_sum_111D, axis=-1)
    sum_ZbC = over_shards(static, sum_ZbC, jax.lax.psum)
    return jnp.sum(loss.uniform_ZbC * sum_ZbC, axis=(1, 2))


def _scan(
    static: Static, step: Callable[..., tuple[Any, Any]], start: Any, *arrays: jax.Array
) -> tuple[Any, Any]:
    """``lax.scan`` over chunks of [B, T, ...]; its second result as [Z, b, T', ...].

    Chunks are sliced out of their arrays and results written in place. Stacked, each would be in
    memory twice.
    """
    parts = tuple(_shards(static, x) for x in arrays)
    length, size = parts[0].shape[2], static.chunk_length
    apart = (length - 1) % size + 1 if static.first_apart else 0
    count = -(-(length - apart) // size)
    # Zeros: a weight of 0 does not count.
    missing = apart + count * size - length
    if missing:
        parts = tuple(
            jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)) for x in parts
        )

    def cut(first: int | jax.Array, size: int) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in parts)

    def turn(state: tuple[Any, Any], first: jax.Array) -> tuple[tuple[Any, Any], None]:
        sums, results = state
        sums, result = step(sums, cut(first, size))
        return (sums, jax.tree.map(functools.partial(_put, first=first), results, result)), None

    one = jax.eval_shape(lambda: step(start, cut(0, size))[1])
    results = jax.tree.map(
        lambda x: jnp.zeros((*x.shape[:2], length + missing, *x.shape[3:]), x.dtype), one
    )
    if apart:
        start, first = step(start, cut(0, apart))
        results = jax.tree.map(functools.partial(_put, first=0), results, first)
    firsts = apart + size * jnp.arange(count)
    return jax.lax.scan(turn, (start, results), firsts)[0] if count else (start, results)


def _put(x: jax.Array, part: jax.Array, *, first: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, first, axis=2)


def _shards(static: Static, x: jax.Array) -> jax.Array:
    """Reshapes [B, T, ...] to shards of the tokens: [Z, b, T', ...]."""
    rows = x.shape[0] // static.batch_shards
    x = x.reshape(static.batch_shards, rows, static.sequence_shards, -1, *x.shape[2:])
    return jnp.moveaxis(x, 2, 1).reshape(static.num_shards, rows, *x.shape[3:])


def _join(static: Static, x_ZbTD: jax.Array, *, like: jax.Array) -> jax.Array:
    """Undoes ``_shards``, and the padding of ``_scan``."""
    batch, length, width = like.shape
    x = x_ZbTD[:, :, : length // static.sequence_shards]
    x = x.reshape(static.batch_shards, static.sequence_shards, *x.shape[1:])
    return jnp.moveaxis(x, 1, 2).reshape(batch, length, width)


def _operand(static: Static, table_VD: jax.Array, *, like: jax.Array) -> jax.Array:
    """Returns the table as the matmuls read it, in the dtype of ``like``."""
    missing = -table_VD.shape[0] % static.table_multiple
    table = table_VD.astype(like.dtype)
    return jnp.pad(table, ((0, missing), (0, 0))) if missing else table
