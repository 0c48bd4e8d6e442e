"""Losses of answers, a chosen and a rejected one or single ones, with or without a reference model.

Dims: B row of the batch, T position, P pair of a row, S segment of a row (two of each pair).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfra.config.kinds import Head
from jaxinfra.config.preferences import PreferenceConfig, PreferenceLoss
from jaxinfra.data.batch import Batch
from jaxinfra.data.pairs import BAD
from jaxinfra.data.whole_rows import MOST_PAIRS
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters
from jaxinfra.ops.exact_rows import LOGSUMEXP_NAME, ordered_log_probability

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
    - reward: -log sigma(c - r), of a reward model's scores c and r (Ouyang et al. 2022, equation 1)

    ``likelihood`` is the weight of an added -c / |c|; by default 1 for orpo and cpo, 0 for others.
    With ``label_smoothing`` e, -log sigma(x) becomes -(1 - e) log sigma(x) - e log sigma(-x).

    An answer's reward is its term in the difference, such as b (c - c') for dpo and ipo.

    Args:
        chosen, rejected: log probabilities of the answers, summed over their tokens, in nats; for
            reward their scores.
        config: kind of the loss and its coefficients.
        chosen_tokens, rejected_tokens: number of tokens in each answer, at least 1.
        chosen_reference, rejected_reference: the summed log probabilities under the model that the
            run started from; dpo and ipo need them.

    Raises:
        ConfigError: dpo or ipo without the sums of a reference; kto, which is of single answers.

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
        case PreferenceLoss.CPO | PreferenceLoss.REWARD:
            return answer
        case PreferenceLoss.KTO:
            raise ConfigError("preferences loss=kto is of single answers, not of pairs")


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLoss:
    """Losses and rewards of single answers: fp32, one number for each, and what they compare."""

    loss: Float[Array, "*answers"]  # what is minimized
    reward: Float[Array, "*answers"]  # beta times the log ratio to the reference
    divergence: Float[Array, ""]  # z of ``kto_loss``, in nats


def kto_loss(
    answers: Float[Array, "*answers"],
    others: Float[Array, "*answers"],
    config: PreferenceConfig,
    *,
    is_good: Bool[Array, "*answers"],
    is_there: Bool[Array, "*answers"],
) -> AnswerLoss:
    """Computes kto's loss of each answer (Ethayarajh et al. 2024, equation 8).

    a is an answer's log ratio to the reference. z = max(0, mean of the others' log ratios) has no
    gradient. sigma is the logistic function, b is beta.

    - a good answer: ``desirable_weight`` (1 - sigma(b (a - z)))
    - a bad answer: ``undesirable_weight`` (1 - sigma(b (z - a)))

    Args:
        answers: log probability of each answer minus that under the reference, in nats.
        others: the same of another row's answer after each prompt.
        is_good: which answers are good.
        is_there: which entries hold an answer; the mean is over these.
    """
    held = jax.lax.stop_gradient(others)
    count = jnp.maximum(jnp.sum(is_there.astype(held.dtype)), 1.0)
    z = jnp.maximum(jnp.sum(jnp.where(is_there, held, 0.0)) / count, 0.0)
    beta = config.strength
    # 1 - sigma(x) = sigma(-x).
    good = config.desirable_weight * jax.nn.sigmoid(-beta * (answers - z))
    bad = config.undesirable_weight * jax.nn.sigmoid(-beta * (z - answers))
    return AnswerLoss(loss=jnp.where(is_good, good, bad), reward=beta * answers, divergence=z)


def _log_odds(mean: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    """log(p / (1 - p)) of p = exp(mean), without the cancellation of 1 - p."""
    mean = jnp.minimum(mean, _SUREST)
    return mean - jnp.log(-jnp.expm1(mean))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairSums:
    """The loss and the logged figures of preference training, summed over the pairs of a batch, or
    over its single answers.
    """

    loss: Float[Array, ""]
    figures: dict[str, Float[Array, ""]]  # sums that are logged, such as rewards


def pair_sums(
    each_BT: Float[Array, "B T"], batch: Batch[jax.Array], config: PreferenceConfig
) -> PairSums:
    """Computes the losses of a batch's pairs or answers from the log probabilities of its targets.

    Args:
        each_BT: log probability of each target in nats; for reward, the score of the text before.
        batch: rows as ``data/whole_rows.py`` makes them; the counted tokens of a segment are its
            answer.
    """
    counted_BTS = _counted(batch)

    def of_pairs(x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        # No matmul: it would round on devices that multiply fp32 in fewer bits.
        sums_BS = jnp.sum(x_BT[..., None] * counted_BTS, axis=1)
        return sums_BS[:, 0::2], sums_BS[:, 1::2]

    tokens = of_pairs(jnp.ones_like(each_BT))
    there_BP = (tokens[0] > 0.0).astype(each_BT.dtype)
    chosen, rejected = of_pairs(each_BT)
    reference = (None, None) if batch.reference is None else of_pairs(batch.reference)
    if config.loss == PreferenceLoss.KTO:
        assert reference[0] is not None, "_require_reference"
        marks_BP = jnp.max(_in_segment(batch) * batch.weights[..., None], axis=1)[:, 0::2]
        ratios = chosen - reference[0], rejected - reference[1]
        return _answer_sums(*ratios, config, is_there=there_BP > 0.0, is_good=marks_BP < BAD)
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

    figures = {
        "pairs": jnp.sum(there_BP),
        "accuracy": total(in_order_BP),
        "margin": total(found.chosen_reward - found.rejected_reward),
        "chosen_reward": total(found.chosen_reward),
        "rejected_reward": total(found.rejected_reward),
    }
    if config.loss != PreferenceLoss.REWARD:
        figures |= {"chosen_nll": -total(chosen), "chosen_tokens": jnp.sum(tokens[0])}
    return PairSums(loss=total(found.loss), figures=figures)


def _answer_sums(
    answers_BP: jax.Array,
    others_BP: jax.Array,
    config: PreferenceConfig,
    *,
    is_there: jax.Array,
    is_good: jax.Array,
) -> PairSums:
    found = kto_loss(answers_BP, others_BP, config, is_good=is_good, is_there=is_there)

    def total(x_BP: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(where, x_BP, 0.0))

    good, bad = is_there & is_good, is_there & ~is_good
    ones_BP = jnp.ones_like(answers_BP)
    is_right = (answers_BP > found.divergence) == is_good
    return PairSums(
        loss=total(found.loss, is_there),
        figures={
            "answers": total(ones_BP, is_there),
            "good": total(ones_BP, good),
            "accuracy": total(is_right.astype(ones_BP.dtype), is_there),
            "good_reward": total(found.reward, good),
            "bad_reward": total(found.reward, bad),
            "divergence": found.divergence * total(ones_BP, is_there),
        },
    )


def pair_record(figures: Mapping[str, Any]) -> dict[str, float]:
    """Converts the summed figures of preference training to means: over pairs or answers, over
    good and bad answers, and over the tokens of chosen ones.
    """
    if not figures:
        return {}
    sums = {name: float(value) for name, value in figures.items()}
    means: dict[str, float] = {}
    if "chosen_nll" in sums:
        means["chosen_nll"] = sums.pop("chosen_nll") / max(sums.pop("chosen_tokens"), 1.0)
    if "answers" in sums:
        count, good = sums.pop("answers"), sums.pop("good")
        means["good_reward"] = sums.pop("good_reward") / max(good, 1.0)
        means["bad_reward"] = sums.pop("bad_reward") / max(count - good, 1.0)
    else:
        count = sums.pop("pairs")
    means |= {name: value / max(count, 1.0) for name, value in sums.items()}
    return {f"preferences/{name}": value for name, value in means.items()}


def count_pairs(batch: Batch[jax.Array]) -> Float[Array, ""]:
    """Counts the pairs of answers, or the single answers, in a batch; at least 1."""
    there_BP = jnp.max(_counted(batch), axis=1)[:, 0::2]
    return jnp.maximum(jnp.sum(there_BP), 1.0)


def _counted(batch: Batch[jax.Array]) -> Float[Array, "B T S"]:
    """1 where a target counts, and is of a segment; whatever its mark."""
    is_counted_BT1 = (batch.weights > 0.0)[..., None].astype(batch.weights.dtype)
    return _in_segment(batch) * is_counted_BT1


def _in_segment(batch: Batch[jax.Array]) -> Float[Array, "B T S"]:
    """1 where a token is of a segment; fused into the sums that follow."""
    assert batch.segment_ids is not None, "rows of pairs have segments"
    same = batch.segment_ids[..., None] == jnp.arange(2 * MOST_PAIRS)[None, None]
    return same.astype(batch.weights.dtype)


def target_values(
    model: ModelDefinition,
    tree: Parameters,
    hidden_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    *,
    sequence_shards: int = 1,
) -> Float[Array, "B T"]:
    """Computes what preference losses read: the log probability of each target in nats, or a reward
    model's score of the text before it; fp32.

    Logits are computed for a chunk of positions at a time and recomputed in the backward pass. If
    sequences are sharded over devices, there is one chunk of all positions.
    """
    if model.config.head is Head.SCORE:
        return model.bind(tree).scores(hidden_BTD)
    return _log_probabilities(model, tree, hidden_BTD, targets_BT, sequence_shards=sequence_shards)


def _log_probabilities(
    model: ModelDefinition,
    tree: Parameters,
    hidden_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    *,
    sequence_shards: int,
) -> Float[Array, "B T"]:
    decoder = model.bind(tree)

    def some(hidden_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        logits_BTV = decoder.logits(hidden_BTD)
        if model.execution.policy.is_exact:
            return ordered_log_probability(logits_BTV, targets_BT)
        at_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
        return at_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)

    with jax.named_scope("loss"):
        rows, length = targets_BT.shape
        num_chunks, size = 1, length
        if sequence_shards == 1:
            most = _CHUNK_LOGITS * model.execution.place.batch_shards
            num_chunks, size = _chunks(length, rows * length * model.config.vocab_size / most)
        if num_chunks == 1:
            return some(hidden_BTD, targets_BT)

        def in_chunks(x: jax.Array) -> jax.Array:
            more = num_chunks * size - length
            if more:
                x = jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])
            return jnp.moveaxis(x.reshape(rows, num_chunks, size, *x.shape[2:]), 1, 0)

        kept = jax.checkpoint_policies.save_only_these_names(LOGSUMEXP_NAME)
        each = jax.lax.map(
            lambda part: jax.checkpoint(some, policy=kept)(*part),
            (in_chunks(hidden_BTD), in_chunks(targets_BT)),
        )
        return jnp.moveaxis(each, 0, 1).reshape(rows, -1)[:, :length]


def _chunks(length: int, parts: float) -> tuple[int, int]:
    """Returns the number of chunks of a row, at least ``parts``, and their positions; the last may
    be padded, so that a length with few divisors is not cut into single positions.
    """
    least = min(math.ceil(parts), length)
    equal = [n for n in range(least, min(2 * least, length) + 1) if length % n == 0]
    size = length // equal[0] if equal else math.floor(length / parts)
    return -(-length // size), size
