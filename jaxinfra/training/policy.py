"""The policy loss of reinforcement learning on completions that the model sampled itself.

Dims: B row of the batch (one completion each), T position.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfra.config.parts import find_part
from jaxinfra.config.rl import Ratio, RlConfig
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PolicySums:
    """The policy loss of a batch, summed with each token's share, and the logged sums."""

    loss: Float[Array, ""]
    figures: dict[str, Float[Array, ""]]


def policy_loss(
    log_probabilities: Float[Array, "B T"],
    old: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    config: RlConfig,
    *,
    weights: Float[Array, "B T"],
) -> Float[Array, "B T"]:
    """Computes the clipped loss of each token: -min(r A, clip(r, 1 - low, 1 + high) A).

    r is the probability ratio of the new policy to the old one (Schulman et al. 2017, equation 7):
    of each token, or for gspo of the whole completion, exp(mean of the log ratios of its tokens)
    (Zheng et al. 2025, equation 7).

    Args:
        log_probabilities: of the sampled tokens under the policy that is trained, in nats.
        old: the same under the policy before the first step on these completions.
        advantages: how much better a completion is than expected.
        config: settings with the ratio and its clip range.
        weights: 1 where a token counts, else 0.

    Examples:
        >>> rl = jaxinfra.RlConfig(prompts="prompts.jsonl", reward="exact_match")
        >>> ones = jnp.ones((1, 2))
        >>> jaxinfra.policy_loss(jnp.log(2.0) * ones, 0.0 * ones, ones, rl, weights=ones)
        Array([[-1.2, -1.2]], dtype=float32)
    """
    ratio = _ratio(log_probabilities, old, config, weights)
    low, high = config.clip_range
    clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def _ratio(
    new_BT: jax.Array, old_BT: jax.Array, config: RlConfig, weights_BT: jax.Array
) -> jax.Array:
    # Tokens that do not count may have any probability: exp must not overflow there.
    difference_BT = jnp.where(weights_BT > 0.0, new_BT - old_BT, 0.0)
    if config.ratio is Ratio.SEQUENCE:
        count_B1 = jnp.maximum(jnp.sum(weights_BT, axis=1, keepdims=True), 1.0)
        mean_B1 = jnp.sum(difference_BT, axis=1, keepdims=True) / count_B1
        difference_BT = jnp.broadcast_to(mean_B1, difference_BT.shape)
    return jnp.exp(difference_BT)


def policy_sums(
    each_BT: Float[Array, "B T"], batch: Batch[jax.Array], config: RlConfig
) -> PolicySums:
    """Computes the policy loss of a batch from the log probabilities of its targets.

    Losses are multiplied by the truncated ratio of trainer to engine. The KL divergence to the
    reference is added without it: exp(d) - d - 1 with d = log(reference / policy), unbiased and
    never negative (Schulman 2020; Shao et al. 2024, equation 4).

    Args:
        each_BT: log probability of each target in nats.
        batch: rows with a ``rollout``, and with a ``reference`` if ``config.kl`` is not 0.
    """
    rollout = batch.rollout
    if rollout is None or (batch.reference is None) != (config.kl == 0.0):
        raise ConfigError(
            f"rl kl={config.kl} with a batch {'without' if rollout is None else 'of'} rollout and "
            f"{'without' if batch.reference is None else 'with'} reference: take batches from "
            "jaxinfra.rl"
        )
    counts_BT = (batch.weights > 0.0).astype(each_BT.dtype)

    def total(x_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counts_BT > 0.0, x_BT, 0.0))

    advantages_BT = rollout.advantages
    if config.loss is None:
        loss_BT = policy_loss(each_BT, rollout.old, advantages_BT, config, weights=counts_BT)
    else:
        own = find_part(config.loss)
        loss_BT = own(each_BT, rollout.old, advantages_BT, weights=counts_BT)
        if loss_BT.shape != each_BT.shape:
            raise ConfigError(
                f"rl.loss {config.loss} returns {loss_BT.shape} for tokens of {each_BT.shape}; it "
                "gives each token's loss, which is weighed and averaged here"
            )
    loss_BT = loss_BT * rollout.importance
    low, high = config.clip_range
    ratio_BT = _ratio(each_BT, rollout.old, config, counts_BT)
    figures = {
        "policy_tokens": jnp.sum(counts_BT),
        "entropy": total(-each_BT),
        "ratio": total(ratio_BT),
    }
    if config.loss is None:
        is_low_BT = (ratio_BT < 1.0 - low) & (advantages_BT < 0.0)
        is_high_BT = (ratio_BT > 1.0 + high) & (advantages_BT > 0.0)
        figures["clipped_low"] = total(is_low_BT.astype(each_BT.dtype))
        figures["clipped_high"] = total(is_high_BT.astype(each_BT.dtype))
    if batch.reference is not None:
        d_BT = jnp.where(counts_BT > 0.0, batch.reference - each_BT, 0.0)
        kl_BT = jnp.expm1(d_BT) - d_BT
        loss_BT = loss_BT + config.kl * kl_BT
        figures["kl"] = total(kl_BT)
    return PolicySums(loss=total(loss_BT * rollout.share), figures=figures)


def policy_record(figures: Mapping[str, Any]) -> dict[str, float]:
    """Converts the summed figures of a policy loss to means over the counted tokens."""
    sums = {name: float(value) for name, value in figures.items()}
    tokens = max(sums.pop("policy_tokens"), 1.0)
    return {f"rl/{name}": value / tokens for name, value in sums.items()}
