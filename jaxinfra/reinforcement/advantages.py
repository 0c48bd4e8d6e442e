"""Advantages of completions from their rewards, and the weights of their tokens in the loss.

Dims: P prompt, G completion of a prompt, R row (completion of any prompt).
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxinfra.config.parts import find_part
from jaxinfra.config.rl import Baseline, Mean, Overlong, Ratio, RlConfig
from jaxinfra.errors import ConfigError

_EPSILON = 1e-6
"""Added to standard deviations, so that groups of equal rewards have advantages of 0."""


def advantages(
    rewards_PG: Float[np.ndarray, "P G"], is_valid_PG: Bool[np.ndarray, "P G"], config: RlConfig
) -> Float[np.ndarray, "P G"]:
    """Computes how much better each completion is than its baseline.

    With r a completion's reward, and means and standard deviations over the completions that have a
    reward:

    - group_standard: (r - mean of the group) / (standard deviation of the group + 1e-6) (Shao et
      al. 2024, section 4.1.2)
    - group_mean: r - mean of the group (Liu et al. 2025, section 3.2)
    - leave_one_out: r - mean of the group's others (Ahmadian et al. 2024, equation 8)
    - batch_standard: (r - mean of all) / (standard deviation of all + 1e-6) (Hu 2025)

    Args:
        rewards_PG: rewards of each group; entries that are not valid are ignored.
        is_valid_PG: which completions have a reward.
        config: names the algorithm (not ppo), or an own function ``(rewards, is_valid) ->
            advantages``.

    Returns:
        Advantages, 0 where there is no reward.
    """
    if config.advantage is not None:
        found = np.asarray(find_part(config.advantage)(rewards_PG, is_valid_PG), np.float64)
        if found.shape != rewards_PG.shape or not np.isfinite(found[is_valid_PG]).all():
            raise ConfigError(
                f"rl.advantage {config.advantage} returns numbers of {found.shape}, or some that "
                f"are not finite, for rewards of {rewards_PG.shape}; give one for each"
            )
        return np.where(is_valid_PG, found, 0.0)
    axis = None if config.baseline is Baseline.BATCH_STANDARD else 1
    r_PG = np.where(is_valid_PG, rewards_PG, 0.0).astype(np.float64)
    count = np.maximum(is_valid_PG.sum(axis=axis, keepdims=True), 1)
    total = r_PG.sum(axis=axis, keepdims=True)
    if config.baseline is Baseline.LEAVE_ONE_OUT:
        # A completion alone in its group has nothing to compare with.
        found = np.where(count > 1, r_PG - (total - r_PG) / np.maximum(count - 1, 1), 0.0)
    else:
        found = r_PG - total / count
        if config.baseline is not Baseline.GROUP_MEAN:
            squares = np.where(is_valid_PG, found, 0.0) ** 2
            deviation = np.sqrt(squares.sum(axis=axis, keepdims=True) / count)
            found = found / (deviation + _EPSILON)
    return np.where(is_valid_PG, found, 0.0)


def has_equal_rewards(
    rewards_PG: Float[np.ndarray, "P G"], is_valid_PG: Bool[np.ndarray, "P G"]
) -> Bool[np.ndarray, "P"]:
    """Returns which groups have no two different rewards, and so teach nothing by themselves."""
    least_P = np.where(is_valid_PG, rewards_PG, np.inf).min(axis=1)
    most_P = np.where(is_valid_PG, rewards_PG, -np.inf).max(axis=1)
    return ~(most_P > least_P)


def overlong_penalty(lengths: Int[np.ndarray, "..."], config: RlConfig) -> Float[np.ndarray, "..."]:
    """Computes what is added to the reward of a long completion (Yu et al. 2025, equation 13).

    It falls linearly from 0, ``overlong_tokens`` before the limit, to -1 at the limit.
    """
    if config.overlong is not Overlong.PENALTY:
        return np.zeros(lengths.shape)
    beyond = lengths - (config.max_new_tokens - config.overlong_tokens)
    return -np.clip(beyond / config.overlong_tokens, 0.0, 1.0)


def importance(
    differences_RT: Float[np.ndarray, "R T"], config: RlConfig
) -> Float[np.ndarray, "R T"]:
    """Computes truncated importance weights, min(ratio, cap), by which losses are multiplied.

    Args:
        differences_RT: log probability of each sampled token by the trainer minus the engine's; 0
            of other tokens.
    """
    if config.importance is Ratio.SEQUENCE:
        summed_R1 = differences_RT.sum(axis=1, keepdims=True)
        differences_RT = np.broadcast_to(summed_R1, differences_RT.shape)
    bounded_RT = np.minimum(differences_RT, np.log(config.importance_cap))
    return np.minimum(np.exp(bounded_RT), config.importance_cap)


def token_shares(
    lengths_R: Int[np.ndarray, "R"], counts_R: Bool[np.ndarray, "R"], config: RlConfig
) -> Float[np.ndarray, "R"]:
    """Computes the weight of each completion's tokens in the loss, times the number of tokens that
    count, by which the loss is divided.

    Args:
        lengths_R: tokens of each completion, at least 1.
        counts_R: which completions count.
    """
    rows = max(int(counts_R.sum()), 1)
    tokens = float(lengths_R[counts_R].sum())
    match config.loss_mean:
        case Mean.TOKEN:
            shares_R = np.ones(lengths_R.shape)
        case Mean.SEQUENCE:
            shares_R = tokens / (rows * lengths_R)
        case Mean.CONSTANT:
            shares_R = np.full(
                lengths_R.shape, tokens / (rows * config.max_new_tokens * config.max_turns)
            )
        case Mean.SUM:
            shares_R = np.full(lengths_R.shape, tokens / rows)
    return np.where(counts_R, shares_R, 0.0)
