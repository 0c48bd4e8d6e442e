"""Chunked over positions: each chunk's logits live only while its gradient is formed.

The loss is a sum, so its gradient is known up to one scalar as soon as the logits are: the forward
pass of a differentiated call computes both gradients chunk by chunk and the backward pass only
scales them. Three matmuls instead of four, and no logits kept.

Every sum over tokens is kept apart for each of their shards until the last chunk, and a chunk takes
an equal part of each. Were it one sum, tokens spread over devices would be communicated in every
turn of the loop: the table's gradient once a chunk.

Dims: B batch, T position, Z shard of the batch times shard of the positions, b row within a shard,
C position within a chunk, D model width, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32


class _Static(NamedTuple):
    z_loss: float
    logit_soft_cap: float | None
    chunk_length: int
    batch_shards: int
    sequence_shards: int

    @property
    def num_shards(self) -> int:
        return self.batch_shards * self.sequence_shards


def linear_cross_entropy_xla(
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float,
    logit_soft_cap: float | None,
    chunk_length: int,
    batch_shards: int,
    sequence_shards: int,
) -> tuple[jax.Array, jax.Array]:
    """As the reference, ``chunk_length`` positions of a shard at a time, the last chunk padded.

    The second result carries no gradient. The table's gradient is summed in fp32. B must be a
    multiple of ``batch_shards``, T of ``sequence_shards``.
    """
    static = _Static(z_loss, logit_soft_cap, chunk_length, batch_shards, sequence_shards)
    return _loss(static, hidden_BTD, table_VD, targets_BT, weights_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden_BTD, table_VD, targets_BT, weights_BT):
    table = table_VD.astype(hidden_BTD.dtype)

    def chunk(sums, operands):
        total_Z, nll_Z, _ = _chunk_loss(static, table, *operands)
        return (sums[0] + total_Z, sums[1] + nll_Z), None

    zero_Z = jnp.zeros(static.num_shards, jnp.float32)
    chunks = _split(static, hidden_BTD, targets_BT, weights_BT)
    total_Z, nll_Z = jax.lax.scan(chunk, (zero_Z, zero_Z), chunks)[0]
    return jnp.sum(total_Z), jnp.sum(nll_Z)


def _forward(static, hidden_BTD, table_VD, targets_BT, weights_BT):
    table = table_VD.astype(hidden_BTD.dtype)

    def chunk(sums, operands):
        total_Z, nll_Z, d_logits_ZbCV = _chunk_loss(static, table, *operands)
        hidden_ZbCD = operands[0]
        d_hidden_ZbCD = einsum_f32("ZbCV,VD->ZbCD", d_logits_ZbCV, table)
        d_table_ZVD = sums[2] + einsum_f32("ZbCV,ZbCD->ZVD", d_logits_ZbCV, hidden_ZbCD)
        sums = (sums[0] + total_Z, sums[1] + nll_Z, d_table_ZVD)
        return sums, d_hidden_ZbCD.astype(hidden_ZbCD.dtype)

    zero_Z = jnp.zeros(static.num_shards, jnp.float32)
    start = (zero_Z, zero_Z, jnp.zeros((static.num_shards, *table_VD.shape), jnp.float32))
    chunks = _split(static, hidden_BTD, targets_BT, weights_BT)
    (total_Z, nll_Z, d_table_ZVD), d_hidden = jax.lax.scan(chunk, start, chunks)
    d_hidden_BTD = _join(static, d_hidden, like=hidden_BTD)
    like = jnp.zeros((0,), table_VD.dtype)
    sums = jnp.sum(total_Z), jnp.sum(nll_Z)
    return sums, (d_hidden_BTD, jnp.sum(d_table_ZVD, axis=0), like, weights_BT)


def _backward(static, residuals, cotangents):
    del static
    d_hidden_BTD, d_table, like, weights_BT = residuals
    scale = cotangents[0]
    d_hidden = (scale * d_hidden_BTD.astype(jnp.float32)).astype(d_hidden_BTD.dtype)
    # Weights mark which targets count; they are data, not a path for gradients.
    return d_hidden, (scale * d_table).astype(like.dtype), None, jnp.zeros_like(weights_BT)


_loss.defvjp(_forward, _backward)


def _split(static: _Static, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ...] to [chunks, Z, b, C, ...], padded with zeros: a weight of 0 does not count."""

    def split(x: jax.Array) -> jax.Array:
        rows = x.shape[0] // static.batch_shards
        x = x.reshape(static.batch_shards, rows, static.sequence_shards, -1, *x.shape[2:])
        x = jnp.moveaxis(x, 2, 1).reshape(static.num_shards, rows, *x.shape[3:])
        length, chunk = x.shape[2], static.chunk_length
        if length % chunk:
            x = jnp.pad(x, [(0, 0), (0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 3))
        x = x.reshape(*x.shape[:2], x.shape[2] // chunk, chunk, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0)

    return tuple(split(x) for x in arrays)


def _join(static: _Static, chunks_ZbCD: jax.Array, *, like: jax.Array) -> jax.Array:
    """Undoes ``_split`` for one array."""
    batch, length, width = like.shape
    shards = (static.batch_shards, static.sequence_shards)
    x = jnp.moveaxis(chunks_ZbCD, 0, 2)
    x = x.reshape(*x.shape[:2], -1, width)[:, :, : length // shards[1]]
    x = jnp.moveaxis(x.reshape(*shards, *x.shape[1:]), 1, 2)
    return x.reshape(batch, length, width)


def _chunk_loss(static: _Static, table, hidden_ZbCD, targets_ZbC, weights_ZbC):
    """Both sums of one chunk by shard, and the gradient of the first by the raw logits."""
    logits_ZbCV = einsum_f32("ZbCD,VD->ZbCV", hidden_ZbCD, table)
    slope_ZbCV = None
    if static.logit_soft_cap is not None:
        ratio_ZbCV = jnp.tanh(logits_ZbCV / static.logit_soft_cap)
        logits_ZbCV = static.logit_soft_cap * ratio_ZbCV
        slope_ZbCV = 1.0 - ratio_ZbCV**2
    lse_ZbC = jax.nn.logsumexp(logits_ZbCV, axis=-1)
    ids_V = jnp.expand_dims(jnp.arange(logits_ZbCV.shape[-1]), (0, 1, 2))
    is_target_ZbCV = ids_V == targets_ZbC[..., None]
    target_ZbC = jnp.sum(jnp.where(is_target_ZbCV, logits_ZbCV, 0.0), axis=-1)
    nll_ZbC = lse_ZbC - target_ZbC
    total_Z = jnp.sum(weights_ZbC * (nll_ZbC + static.z_loss * lse_ZbC**2), axis=(1, 2))
    nll_Z = jnp.sum(weights_ZbC * nll_ZbC, axis=(1, 2))

    probability_ZbCV = jnp.exp(logits_ZbCV - lse_ZbC[..., None])
    row_ZbC = 1.0 + 2.0 * static.z_loss * lse_ZbC
    d_logits_ZbCV = probability_ZbCV * row_ZbC[..., None] - is_target_ZbCV.astype(jnp.float32)
    d_logits_ZbCV = weights_ZbC[..., None] * d_logits_ZbCV
    if slope_ZbCV is not None:
        d_logits_ZbCV = d_logits_ZbCV * slope_ZbCV
    return total_Z, nll_Z, d_logits_ZbCV.astype(hidden_ZbCD.dtype)
