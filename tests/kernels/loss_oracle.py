"""The linear cross-entropy from its closed form in float64."""

import jax
import numpy as np

from tests.rounding import Rounded, stored


def exact(
    arrays: tuple[jax.Array, ...],
    *,
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
):
    """(total, nll), and the gradients of the total by hidden and table; what is kept of hidden's
    dtype is rounded to it. d total / d logit = w (p (1 + 2 z lse) - q), q the target distribution
    (1 - s) [v = target] + s / V.

    Args:
        arrays: hidden, table, targets, weights.
    """
    hidden, table, targets, weights = (np.asarray(x, float) for x in arrays)
    hidden, table, kept = Rounded(hidden), Rounded(table), arrays[0].dtype
    num_ids = table.shape[0]
    raw = hidden @ table.T
    logits = raw if logit_soft_cap is None else logit_soft_cap * np.tanh(raw / logit_soft_cap)
    largest = logits.max(axis=-1, keepdims=True)
    lse = (largest + np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True)))[..., 0]
    is_target = np.arange(num_ids) == targets[..., None]
    places = *np.indices(targets.shape), np.clip(targets, 0, num_ids - 1).astype(int)
    nll = lse - np.where(is_target.any(axis=-1), logits[places], 0.0)
    smoothed = (1 - label_smoothing) * nll + label_smoothing * (lse - logits.mean(axis=-1))
    slope = stored(np.exp(logits - lse[..., None]), kept) * (1 + 2 * z_loss * lse)[..., None]
    slope = slope - ((1 - label_smoothing) * is_target + label_smoothing / num_ids)
    slope = slope * weights[..., None]
    if logit_soft_cap is not None:
        slope = slope * (1 - np.tanh(raw / logit_soft_cap) ** 2)
    slope = stored(slope, kept)
    sums = (np.sum(weights * (smoothed + z_loss * lse**2)), np.sum(weights * nll))
    return sums, (slope @ table, np.einsum("btv,btd->vd", slope, hidden))
