"""Reference of the vocabulary loss in plain jnp: the contract of every implementation.

Dims: B batch, T position, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32


def linear_cross_entropy_reference(
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_loss: float,
    logit_soft_cap: float | None,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of weight * (smoothed + z_loss * lse^2), sum of weight * nll), fp32 scalars.

    logits = hidden table^T, operands in hidden's dtype, sums in fp32; nll = lse(logits) -
    logits[target]; smoothed = (1 - s) nll + s (lse - mean of the logits), s = ``label_smoothing``.
    JAX differentiates the first sum; the second is for reporting and carries no gradient.
    """
    logits_BTV = einsum_f32("BTD,VD->BTV", hidden_BTD, table_VD.astype(hidden_BTD.dtype))
    if logit_soft_cap is not None:
        logits_BTV = logit_soft_cap * jnp.tanh(logits_BTV / logit_soft_cap)
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A sum, not a gather: a target outside the vocabulary has no logit, and not the last or NaN.
    is_target_BTV = jnp.arange(logits_BTV.shape[-1])[None, None, :] == targets_BT[..., None]
    nll_BT = lse_BT - jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    uniform_BT = lse_BT - jnp.mean(logits_BTV, axis=-1)
    smoothed_BT = (1.0 - label_smoothing) * nll_BT + label_smoothing * uniform_BT
    total = jnp.sum(weights_BT * (smoothed_BT + z_loss * lse_BT**2))
    return total, jax.lax.stop_gradient(jnp.sum(weights_BT * nll_BT))
