"""The XLA implementation of one chunk of the loss: fp32 logits and their gradient.

Dims: Z shard of the tokens, b row within a shard, C position within a chunk, D model width,
V vocabulary.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32

from .chunked import ChunkLoss, Static, logsumexp, over_shards


def chunk_loss(
    static: Static,
    table: jax.Array,
    hidden_ZbCD: jax.Array,
    targets_ZbC: jax.Array,
    weights_ZbC: jax.Array,
    *,
    with_gradient: bool,
) -> ChunkLoss:
    """Computes a chunk's loss from fp32 logits and, if ``with_gradient``, the logits' gradient."""
    logits_ZbCV = einsum_f32("ZbCD,VD->ZbCV", hidden_ZbCD, table)
    slope_ZbCV = None
    if static.logit_soft_cap is not None:
        ratio_ZbCV = jnp.tanh(logits_ZbCV / static.logit_soft_cap)
        logits_ZbCV = static.logit_soft_cap * ratio_ZbCV
        slope_ZbCV = 1.0 - ratio_ZbCV**2
    lse_ZbC = over_shards(static, jax.nn.logsumexp(logits_ZbCV, axis=-1), logsumexp)
    ids_V = jnp.expand_dims(jnp.arange(logits_ZbCV.shape[-1]), (0, 1, 2))
    is_target_ZbCV = ids_V == targets_ZbC[..., None]
    target_ZbC = jnp.sum(jnp.where(is_target_ZbCV, logits_ZbCV, 0.0), axis=-1)
    nll_ZbC = lse_ZbC - over_shards(static, target_ZbC, jax.lax.psum)
    smoothed_ZbC, smoothing = nll_ZbC, static.label_smoothing
    if smoothing:
        sum_ZbC = over_shards(static, jnp.sum(logits_ZbCV, axis=-1), jax.lax.psum)
        uniform_ZbC = lse_ZbC - sum_ZbC / static.num_ids_of_all
        smoothed_ZbC = (1.0 - smoothing) * nll_ZbC + smoothing * uniform_ZbC
    total_Z = jnp.sum(weights_ZbC * (smoothed_ZbC + static.z_loss * lse_ZbC**2), axis=(1, 2))
    nll_Z = jnp.sum(weights_ZbC * nll_ZbC, axis=(1, 2))
    if not with_gradient:
        return ChunkLoss(total_Z, nll_Z)
    probability_ZbCV = jnp.exp(logits_ZbCV - lse_ZbC[..., None])
    row_ZbC = 1.0 + 2.0 * static.z_loss * lse_ZbC
    d_logits_ZbCV = probability_ZbCV * row_ZbC[..., None]
    d_logits_ZbCV -= (1.0 - smoothing) * is_target_ZbCV.astype(jnp.float32)
    if smoothing:
        d_logits_ZbCV -= smoothing / static.num_ids_of_all
    d_logits_ZbCV = weights_ZbC[..., None] * d_logits_ZbCV
    if slope_ZbCV is not None:
        d_logits_ZbCV = d_logits_ZbCV * slope_ZbCV
    return ChunkLoss(total_Z, nll_Z, d_logits_ZbCV.astype(hidden_ZbCD.dtype))
