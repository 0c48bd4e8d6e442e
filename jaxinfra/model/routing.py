"""Routing: the choice of each token's experts and their weights, and losses that balance loads.

All operations are in fp32 and independent per token, so on a mesh each device chooses experts for
its own tokens.

Dims: B batch, T position, E expert, G group of experts, S expert of a group, K choice.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.routing import GroupScore, RoutingConfig, Scoring
from jaxinfra.model.passes import Sums
from jaxinfra.ops.exact_rows import ordered_softmax, ordered_sum

_LEAST_SUM = 1e-20  # scores of 0 are renormalized to 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoice:
    """The chosen experts of every token and their weights."""

    expert_BTK: jax.Array  # int32, the best first; num_experts for none
    weight_BTK: jax.Array
    is_chosen_BTE: jax.Array  # bool
    share_BTE: jax.Array  # scores normalized to sum 1 over experts, for balance losses


def choose(
    logits_BTE: jax.Array,
    *,
    config: ExpertsConfig,
    correction_E: jax.Array | None,
    counts_BT: jax.Array,
    is_exact: bool = False,
) -> ExpertChoice:
    """Chooses the ``top_k`` experts of each token that counts; on ties, the lower index.

    Args:
        correction_E: bias added to scores for the choice only, not for the weights.
        counts_BT: bool, False for padding tokens, which choose no expert.
        is_exact: whether scores are summed in an order that other tokens do not change.
    """
    routing = config.routing
    total = ordered_sum if is_exact else _row_sum
    softmax = ordered_softmax if is_exact else functools.partial(jax.nn.softmax, axis=-1)
    is_sigmoid = routing.scoring is Scoring.SIGMOID
    scores_BTE = jax.nn.sigmoid(logits_BTE) if is_sigmoid else softmax(logits_BTE)
    ranked_BTE = jax.lax.stop_gradient(scores_BTE)
    if correction_E is not None:
        ranked_BTE = ranked_BTE + jax.lax.stop_gradient(correction_E)[None, None]
    if routing.num_groups > 1:
        ranked_BTE = _within_best_groups(ranked_BTE, routing)
    best_BTK = jax.lax.top_k(ranked_BTE, config.top_k)[1].astype(jnp.int32)
    is_best = [_is_expert(best_BTK[..., k], config.num_experts) for k in range(config.top_k)]

    def of_chosen(values_BTE: jax.Array) -> jax.Array:
        # Not a gather: its gradient would be a scatter.
        picked = [jnp.sum(jnp.where(is_k, values_BTE, 0.0), axis=-1) for is_k in is_best]
        return jnp.stack(picked, axis=-1)

    if routing.scoring is Scoring.SPARSE_MIXER:
        weight_BTK = _sparse_mixer(logits_BTE, is_best, of_chosen(logits_BTE), routing.tolerance)
    elif not routing.renormalize:
        weight_BTK = of_chosen(scores_BTE)
    elif routing.scoring is Scoring.SOFTMAX:
        weight_BTK = softmax(of_chosen(logits_BTE))
    else:
        weight_BTK = _normalized(of_chosen(scores_BTE), total)
    counted_BT1 = counts_BT[..., None]
    return ExpertChoice(
        expert_BTK=jnp.where(counted_BT1, best_BTK, config.num_experts),
        weight_BTK=jnp.where(counted_BT1, routing.scale * weight_BTK, 0.0),
        is_chosen_BTE=jnp.any(jnp.stack(is_best), axis=0) & counted_BT1,
        share_BTE=_normalized(scores_BTE, total) if is_sigmoid else scores_BTE,
    )


def within_capacity(
    choice: ExpertChoice, *, config: ExpertsConfig
) -> tuple[ExpertChoice, jax.Array]:
    """Drops choices beyond each expert's capacity, a sequence's last ones first; counts them."""
    factor = config.balance.capacity_factor
    assert factor is not None
    length, num_experts = choice.is_chosen_BTE.shape[1:]
    room = max(int(factor * length * config.top_k / num_experts), 1)
    fits_BTE = jnp.cumsum(choice.is_chosen_BTE, axis=1, dtype=jnp.int32) <= room
    fits_BTK = jnp.stack(
        [
            jnp.any(_is_expert(choice.expert_BTK[..., k], num_experts) & fits_BTE, axis=-1)
            for k in range(config.top_k)
        ],
        axis=-1,
    )
    kept = dataclasses.replace(
        choice,
        expert_BTK=jnp.where(fits_BTK, choice.expert_BTK, num_experts),
        weight_BTK=jnp.where(fits_BTK, choice.weight_BTK, 0.0),
    )
    return kept, jnp.sum(choice.is_chosen_BTE & ~fits_BTE, dtype=choice.weight_BTK.dtype)


def balance_sums(
    choice: ExpertChoice,
    logits_BTE: jax.Array,
    *,
    config: ExpertsConfig,
    counts_BT: jax.Array,
    over_batch,
) -> Sums:
    """Computes the configured balance losses as sums over tokens, and the tokens per expert.

    Args:
        over_batch: function that sums an array over the devices that shard the batch.
    """
    balance, dtype = config.balance, logits_BTE.dtype
    counts_BT = counts_BT.astype(dtype)
    chosen_BTE = choice.is_chosen_BTE.astype(dtype)
    tokens_E = jnp.sum(chosen_BTE, axis=(0, 1))
    losses = {}
    if balance.switch_loss:
        # Only the shares know of other tokens, and they have no gradient: a sum over tokens.
        tokens = over_batch(jnp.sum(counts_BT))
        share_E = over_batch(tokens_E) / jnp.maximum(tokens, 1.0)
        each_BT = config.num_experts * jnp.sum(choice.share_BTE * share_E[None, None], axis=-1)
        losses["balance"] = balance.switch_loss * jnp.sum(counts_BT * each_BT)
    if balance.sequence_loss:
        tokens_B1 = jnp.maximum(jnp.sum(counts_BT, axis=1, keepdims=True), 1.0)
        share_BE = jnp.sum(chosen_BTE, axis=1) * (config.num_experts / config.top_k) / tokens_B1
        each_BT = jnp.sum(choice.share_BTE * share_BE[:, None], axis=-1)
        losses["sequence_balance"] = balance.sequence_loss * jnp.sum(counts_BT * each_BT)
    if balance.z_loss:
        z_BT = jax.nn.logsumexp(logits_BTE, axis=-1) ** 2
        losses["router_z"] = balance.z_loss * jnp.sum(counts_BT * z_BT)
    return Sums(losses=losses, added={"expert_tokens": tokens_E})


@dataclasses.dataclass(frozen=True, slots=True)
class EvenLoads:
    """Update rule of a router's correction bias (arXiv 2408.15664, algorithm 1).

    The bias rises by ``rate`` for experts with fewer tokens than the layer's mean, and falls by
    ``rate`` for experts with more.
    """

    rate: float

    def __call__(self, bias_E: jax.Array, sums: Sums, emitted: jax.Array) -> jax.Array:
        """Returns the correction bias after a step."""
        del emitted
        tokens_E = sums.added["expert_tokens"]
        return bias_E + self.rate * jnp.sign(jnp.mean(tokens_E, keepdims=True) - tokens_E)


def _sparse_mixer(
    logits_BTE: jax.Array, is_best: list[jax.Array], best_BTK: jax.Array, tolerance: float
) -> jax.Array:
    """Each choice's share among the experts not chosen before it that are close to it."""
    weights, is_left_BTE = [], jnp.ones(logits_BTE.shape, jnp.bool)
    for k, is_k_BTE in enumerate(is_best):
        best_BT1 = best_BTK[..., k : k + 1]
        given_BTE, given_BT1 = map(jax.lax.stop_gradient, (logits_BTE, best_BT1))
        distance_BTE = (given_BT1 - given_BTE) / jnp.maximum(jnp.abs(given_BTE), given_BT1)
        is_near_BTE = is_left_BTE & (distance_BTE <= tolerance)
        shares_BTE = jax.nn.softmax(logits_BTE, axis=-1, where=is_near_BTE)
        weights.append(jnp.sum(jnp.where(is_k_BTE, shares_BTE, 0.0), axis=-1))
        is_left_BTE &= ~is_k_BTE
    return jnp.stack(weights, axis=-1)


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _normalized(scores: jax.Array, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return scores / (total(scores) + _LEAST_SUM)


def _within_best_groups(ranked_BTE: jax.Array, routing: RoutingConfig) -> jax.Array:
    """Scores of the best groups' experts, -inf of the others."""
    ranked_BTGS = ranked_BTE.reshape(*ranked_BTE.shape[:-1], routing.num_groups, -1)
    if routing.group_score is GroupScore.MAX:
        group_BTG = jnp.max(ranked_BTGS, axis=-1)
    else:
        group_BTG = jnp.sum(jax.lax.top_k(ranked_BTGS, 2)[0], axis=-1)
    best_BTK = jax.lax.top_k(group_BTG, routing.top_groups)[1]
    is_best = [_is_expert(best_BTK[..., k], routing.num_groups) for k in range(routing.top_groups)]
    is_best_BTG = jnp.any(jnp.stack(is_best), axis=0)
    return jnp.where(is_best_BTG[..., None], ranked_BTGS, -jnp.inf).reshape(ranked_BTE.shape)


def _is_expert(index_BT: jax.Array, count: int) -> jax.Array:
    """bool [B, T, count]: whether it is the index."""
    return index_BT[..., None] == jnp.arange(count, dtype=index_BT.dtype)[None, None]
