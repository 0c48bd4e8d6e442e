"""Chunked over positions: each chunk's logits live only while its gradient is formed.

The loss is a sum, so its gradient is known up to one scalar as soon as the logits are: the forward
pass of a differentiated call computes both gradients chunk by chunk and the backward pass only
scales them. Three matmuls instead of four, and no logits kept.

Dims: B batch, C position within a chunk, D model width, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32


class _Static(NamedTuple):
    z_loss: float
    logit_soft_cap: float | None
    num_chunks: int


def linear_cross_entropy_xla(
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float,
    logit_soft_cap: float | None,
    num_chunks: int,
) -> tuple[jax.Array, jax.Array]:
    """As the reference, in ``num_chunks`` equal chunks of positions (T must be a multiple).

    The second result carries no gradient. The table's gradient is summed in fp32.
    """
    static = _Static(z_loss, logit_soft_cap, num_chunks)
    return _loss(static, hidden_BTD, table_VD, targets_BT, weights_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden_BTD, table_VD, targets_BT, weights_BT):
    table = table_VD.astype(hidden_BTD.dtype)

    def chunk(sums, operands):
        total, nll, _ = _chunk_loss(static, table, *operands)
        return (sums[0] + total, sums[1] + nll), None

    zero = jnp.zeros((), jnp.float32)
    chunks = _split(static, hidden_BTD, targets_BT, weights_BT)
    return jax.lax.scan(chunk, (zero, zero), chunks)[0]


def _forward(static, hidden_BTD, table_VD, targets_BT, weights_BT):
    table = table_VD.astype(hidden_BTD.dtype)

    def chunk(sums, operands):
        total, nll, d_logits_BCV = _chunk_loss(static, table, *operands)
        hidden_BCD = operands[0]
        d_hidden_BCD = einsum_f32("BCV,VD->BCD", d_logits_BCV, table).astype(hidden_BCD.dtype)
        d_table = sums[2] + einsum_f32("BCV,BCD->VD", d_logits_BCV, hidden_BCD)
        return (sums[0] + total, sums[1] + nll, d_table), d_hidden_BCD

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(table_VD.shape, jnp.float32))
    chunks = _split(static, hidden_BTD, targets_BT, weights_BT)
    (total, nll, d_table), d_hidden = jax.lax.scan(chunk, start, chunks)
    d_hidden_BTD = jnp.moveaxis(d_hidden, 0, 1).reshape(hidden_BTD.shape)
    like = jnp.zeros((0,), table_VD.dtype)
    return (total, nll), (d_hidden_BTD, d_table, like, weights_BT)


def _backward(static, residuals, cotangents):
    del static
    d_hidden_BTD, d_table, like, weights_BT = residuals
    scale = cotangents[0]
    d_hidden = (scale * d_hidden_BTD.astype(jnp.float32)).astype(d_hidden_BTD.dtype)
    # Weights mark which targets count; they are data, not a path for gradients.
    return d_hidden, (scale * d_table).astype(like.dtype), None, jnp.zeros_like(weights_BT)


_loss.defvjp(_forward, _backward)


def _split(static: _Static, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ...] to [num_chunks, B, C, ...]: batch stays whole, so it may stay sharded."""
    return tuple(
        jnp.moveaxis(x.reshape(x.shape[0], static.num_chunks, -1, *x.shape[2:]), 1, 0)
        for x in arrays
    )


def _chunk_loss(static: _Static, table, hidden_BCD, targets_BC, weights_BC):
    """Both sums of one chunk, and the gradient of the first by the raw logits."""
    logits_BCV = einsum_f32("BCD,VD->BCV", hidden_BCD, table)
    slope_BCV = None
    if static.logit_soft_cap is not None:
        ratio_BCV = jnp.tanh(logits_BCV / static.logit_soft_cap)
        logits_BCV = static.logit_soft_cap * ratio_BCV
        slope_BCV = 1.0 - ratio_BCV**2
    lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    is_target_BCV = jnp.arange(logits_BCV.shape[-1])[None, None, :] == targets_BC[..., None]
    target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
    nll_BC = lse_BC - target_BC
    total = jnp.sum(weights_BC * (nll_BC + static.z_loss * lse_BC**2))

    probability_BCV = jnp.exp(logits_BCV - lse_BC[..., None])
    row_BC = 1.0 + 2.0 * static.z_loss * lse_BC
    d_logits_BCV = probability_BCV * row_BC[..., None] - is_target_BCV.astype(jnp.float32)
    d_logits_BCV = weights_BC[..., None] * d_logits_BCV
    if slope_BCV is not None:
        d_logits_BCV = d_logits_BCV * slope_BCV
    return total, jnp.sum(weights_BC * nll_BC), d_logits_BCV.astype(hidden_BCD.dtype)
