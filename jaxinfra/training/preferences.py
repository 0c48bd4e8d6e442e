"""Losses of pairs of answers, a chosen and a rejected one, with or without a reference model.

Dims: B row of the batch, T position, P pair of a row, S segment of a row (two of each pair).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfra.config.preferences import PreferenceConfig, PreferenceLoss
from jaxinfra.data.batch import Batch
from jaxinfra.data.whole_rows import MOST_PAIRS
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters

_SUREST = -1e-6
"""Largest mean log probability in ORPO's odds, which are infinite at probability 1."""

_CHUNK_LOGITS = 1 << 27
"""Largest number of logits that a device computes at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss:
    """The losses and rewards of pairs: fp32, one number for each pair.

    Examples:
        >>> tokens = jnp.array([3.0])
        >>> pair = jaxinfra.preference_loss(
        ...     jnp.array([-3.0]), jnp.array([-9.0]), jaxinfra.PreferenceConfig(loss="simpo"),
        ...     chosen_tokens=tokens, rejected_tokens=tokens,
        ... )
        >>> pair.chosen_reward > pair.rejected_reward
        Array([ True], dtype=bool)
    """

    loss: Float[Array, "*pairs"]  # what is minimized
    chosen_reward: Float[Array, "*pairs"]  # of the better answer
    rejected_reward: Float[Array, "*pairs"]  # of the other one


def preference_loss(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    config: PreferenceConfig,
    *,
    chosen_tokens: Float[Array, "*pairs"],
    rejected_tokens: Float[Array, "*pairs"],
    chosen_reference: Float[Array, "*pairs"] | None = None,
    rejected_reference: Float[Array, "*pairs"] | None = None,
) -> PairLoss:
    """Computes the loss of each pair of answers from their log probabilities: c of the chosen
    answer, r of the rejected one.

    sigma is the logistic function, b is beta, |c| the number of tokens of the chosen answer. c'
    and r' are the log probabilities under the reference model:

    - dpo: -log sigma(b (c - c') - b (r - r')) (Rafailov et al. 2023, equation 7)
    - ipo: (c - c' - r + r' - 1 / (2 b))^2 (Azar et al. 2023, equation 17)
    - simpo: -log sigma(b c / |c| - b r / |r| - margin) (Meng et al. 2024, equation 6)
    - cpo: -log sigma(b c - b r) (Xu et al. 2024, equation 6)
    - orpo: -b log sigma(log odds(c) - log odds(r)), odds(x) = p / (1 - p), p = exp(x / |x|) (Hong
      et al. 2024, equations 4 and 7)

    ``likelihood`` is the weight of an added -c / |c|; by default 1 for orpo and cpo, 0 for others.
    With ``label_smoothing`` e, -log sigma(x) becomes -(1 - e) log sigma(x) - e log sigma(-x).

    An answer's reward is its term in the difference, such as b (c - c') for dpo and ipo.

    Args:
        chosen, rejected: log probabilities of the answers, summed over their tokens, in nats.
        config: kind of the loss and its coefficients.
        chosen_tokens, rejected_tokens: number of tokens in each answer, at least 1.
        chosen_reference, rejected_reference: the summed log probabilities under the model that the
            run started from; dpo and ipo need them.

    Raises:
        ConfigError: dpo or ipo without the sums of a reference.

    Examples:
        >>> pair = jaxinfra.preference_loss(
        ...     jnp.array([-3.0]), jnp.array([-9.0]), jaxinfra.PreferenceConfig(loss="simpo"),
        ...     chosen_tokens=jnp.array([3.0]), rejected_tokens=jnp.array([3.0]),
        ... )
        >>> found = (pair.chosen_reward, pair.rejected_reward, pair.loss)
        >>> [f"{float(each[0]):.4f}" for each in found]
        ['-2.0000', '-6.0000', '0.0486']
    """
    better = _term(chosen, chosen_tokens, chosen_reference, config)
    worse = _term(rejected, rejected_tokens, rejected_reference, config)
    each = _compared(better, worse, config)
    if config.likelihood_weight:
        each = each - config.likelihood_weight * (chosen / chosen_tokens)
    beta = config.strength
    return PairLoss(loss=each, chosen_reward=beta * better, rejected_reward=beta * worse)


def _term(
    answer: Float[Array, "*pairs"],
    tokens: Float[Array, "*pairs"],
    reference: Float[Array, "*pairs"] | None,
    config: PreferenceConfig,
) -> Float[Array, "*pairs"]:
    """Term that the loss compares for one answer, before it is multiplied by beta."""
    match config.loss:
        case PreferenceLoss.DPO | PreferenceLoss.IPO:
            if reference is None:
                raise ConfigError(
                    f"preferences loss={config.loss} without log probabilities of a reference: "
                    "give chosen_reference and rejected_reference, or choose simpo, orpo or cpo"
                )
            return answer - reference
        case PreferenceLoss.SIMPO:
            return answer / tokens
        case PreferenceLoss.ORPO:
            return _log_odds(answer / tokens)
        case PreferenceLoss.CPO:
            return answer


def _compared(
    better: Float[Array, "*pairs"], worse: Float[Array, "*pairs"], config: PreferenceConfig
) -> Float[Array, "*pairs"]:
    """The loss of pairs from the two terms that it compares."""
    beta, loss = config.strength, config.loss
    if loss == PreferenceLoss.IPO:
        return jnp.square(better - worse - 1.0 / (2.0 * beta))
    if loss == PreferenceLoss.ORPO:
        return -beta * jax.nn.log_sigmoid(better - worse)
    logit = beta * (better - worse) - config.target_margin
    smoothing = config.label_smoothing
    each = -(1.0 - smoothing) * jax.nn.log_sigmoid(logit)
    if smoothing:
        each = each - smoothing * jax.nn.log_sigmoid(-logit)
    return each


def _log_odds(mean: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    """log(p / (1 - p)) of p = exp(mean), without the cancellation of 1 - p."""
    mean = jnp.minimum(mean, _SUREST)
    return mean - jnp.log(-jnp.expm1(mean))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairSums:
    """The loss and the logged figures of preference training, summed over the pairs of a batch."""

    loss: Float[Array, ""]
    figures: dict[str, Float[Array, ""]]  # sums that are logged, such as rewards


def pair_sums(
    each_BT: Float[Array, "B T"], batch: Batch[jax.Array], config: PreferenceConfig
) -> PairSums:
    """Computes the losses of a batch's pairs from the log probabilities of its targets.

    Args:
        batch: rows as ``data/whole_rows.py`` makes them; the counted tokens of a segment are its
            answer.
    """
    counted_BTS = _in_segment(batch) * batch.weights[..., None]

    def of_pairs(x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        # No matmul: it would round on devices that multiply fp32 in fewer bits.
        sums_BS = jnp.sum(x_BT[..., None] * counted_BTS, axis=1)
        return sums_BS[:, 0::2], sums_BS[:, 1::2]

    tokens = of_pairs(jnp.ones_like(each_BT))
    there_BP = (tokens[0] > 0.0).astype(each_BT.dtype)
    chosen, rejected = of_pairs(each_BT)
    reference = (None, None) if batch.reference is None else of_pairs(batch.reference)
    found = preference_loss(
        chosen,
        rejected,
        config,
        chosen_tokens=jnp.maximum(tokens[0], 1.0),
        rejected_tokens=jnp.maximum(tokens[1], 1.0),
        chosen_reference=reference[0],
        rejected_reference=reference[1],
    )
    in_order_BP = (found.chosen_reward > found.rejected_reward).astype(each_BT.dtype)

    def total(x_BP: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(there_BP > 0.0, x_BP, 0.0))

    return PairSums(
        loss=total(found.loss),
        figures={
            "pairs": jnp.sum(there_BP),
            "accuracy": total(in_order_BP),
            "margin": total(found.chosen_reward - found.rejected_reward),
            "chosen_reward": total(found.chosen_reward),
            "rejected_reward": total(found.rejected_reward),
            "chosen_nll": -total(chosen),
            "chosen_tokens": jnp.sum(tokens[0]),
        },
    )


def count_pairs(batch: Batch[jax.Array]) -> Float[Array, ""]:
    """Counts the pairs of answers in a batch, at least 1."""
    counted_BTS = _in_segment(batch) * batch.weights[..., None]
    there_BP = jnp.max(counted_BTS, axis=1)[:, 0::2] > 0.0
    return jnp.maximum(jnp.sum(there_BP.astype(batch.weights.dtype)), 1.0)


def _in_segment(batch: Batch[jax.Array]) -> Float[Array, "B T S"]:
    """1 where a token is of a segment; fused into the sums that follow."""
    assert batch.segment_ids is not None, "rows of pairs have segments"
    same = batch.segment_ids[..., None] == jnp.arange(2 * MOST_PAIRS)[None, None]
    return same.astype(batch.weights.dtype)


def log_probabilities(
    model: ModelDefinition,
    tree: Parameters,
    hidden_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    *,
    sequence_shards: int = 1,
) -> Float[Array, "B T"]:
    """Computes the log probability of each target in nats, fp32.

    Logits are computed for a chunk of positions at a time and recomputed in the backward pass. If
    sequences are sharded over devices, there is one chunk of all positions.
    """
    decoder = model.bind(tree)

    def some(hidden_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        logits_BTV = decoder.logits(hidden_BTD)
        at_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
        return at_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)

    with jax.named_scope("loss"):
        rows, length = targets_BT.shape
        num_chunks = 1
        if sequence_shards == 1:
            most = _CHUNK_LOGITS * model.execution.place.batch_shards
            parts = rows * length * model.config.vocab_size / most
            num_chunks = min(
                n for n in range(1, length + 1) if length % n == 0 and n >= min(parts, length)
            )
        if num_chunks == 1:
            return some(hidden_BTD, targets_BT)

        def in_chunks(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(rows, num_chunks, -1, *x.shape[2:]), 1, 0)

        each = jax.lax.map(
            lambda part: jax.checkpoint(some)(*part), (in_chunks(hidden_BTD), in_chunks(targets_BT))
        )
        return jnp.moveaxis(each, 0, 1).reshape(rows, length)
