"""Advantages of completions from rewards or a value head, and their tokens' weights in the loss.

Dims: P prompt, G completion of a prompt, R row (completion of any prompt), B completion of a part
of a rollout, T position, D hidden, E hidden and 1.
"""

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxinfra.config.parts import find_part
from jaxinfra.config.rl import Baseline, Mean, Overlong, Ratio, RlConfig
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged
from jaxinfra.training.job import Job
from jaxinfra.training.state import State

_EPSILON = 1e-6
"""Added to standard deviations, so that groups of equal rewards have advantages of 0."""
_RIDGE = 0.1  # weight of the squared change of the head, in parts of a feature's mean square


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


def advantages_and_returns(
    rewards_R: Float[np.ndarray, "R"],
    values_RT: Float[np.ndarray, "R T"],
    is_sampled_RT: Bool[np.ndarray, "R T"],
    gae_lambda: float,
) -> tuple[Float[np.ndarray, "R T"], Float[np.ndarray, "R T"]]:
    """Computes generalized advantage estimates of each sampled token, and the returns that the
    value head is fitted to (Schulman et al. 2016, equation 16, undiscounted).

    The reward comes with the last sampled token. Tokens that the model has not sampled are no
    steps: the value of a step is followed by that of the next sampled token.

    Args:
        values_RT: expected reward before each target.
        gae_lambda: 1 compares the reward with the value; less trusts later values more.
    """
    gains_RT, next_R = np.zeros(values_RT.shape), np.asarray(rewards_R, np.float64)
    gain_R = np.zeros(len(values_RT))
    for t in reversed(range(values_RT.shape[1])):
        at_R = is_sampled_RT[:, t]
        found_R = next_R - values_RT[:, t] + gae_lambda * gain_R
        gain_R = np.where(at_R, found_R, gain_R)
        next_R = np.where(at_R, values_RT[:, t], next_R)
        gains_RT[:, t] = np.where(at_R, gain_R, 0.0)
    return gains_RT, np.where(is_sampled_RT, gains_RT + values_RT, 0.0)


@final
class Critic:
    """A value head on the policy's last hidden states, which its gradients do not change.

    After each rollout it moves to the least squares fit of the rollout's returns, as far as a
    penalty on its change allows. It has no learning rate, and its state is one vector.
    """

    def __init__(self, job: Job):
        assert job.config.rl is not None
        self._job, self._gae_lambda = job, job.config.rl.gae_lambda_or_default
        self.weights_E = np.zeros(job.config.model.model_dim + 1)
        model = define_model(job.config.model, job.model.execution, lora=job.config.lora)
        self._values, self._moments = jax.jit(_make_values(model)), jax.jit(_make_moments(model))

    def learn(
        self,
        state: State,
        parts: Sequence[Batch[np.ndarray]],
        rewards_R: Float[np.ndarray, "R"],
        counts_R: Bool[np.ndarray, "R"],
    ) -> tuple[Float[np.ndarray, "R T"], dict[str, float]]:
        """Returns advantages of a rollout's tokens and figures, then fits the head to its returns.

        Advantages are standardized over the tokens of completions that count.

        Args:
            state: of the policy that sampled.
            parts: the rollout, in parts of some rows.
        """
        tree = merged(self._job.model.frozen, state.tree)
        placed = [self._job.put(part) for part in parts]
        head_E = self.weights_E.astype(np.float32)
        values_RT = np.concatenate([self._values(tree, part, head_E) for part in placed])
        is_sampled_RT = np.concatenate([part.weights > 0.0 for part in parts])
        gains_RT, returns_RT = advantages_and_returns(
            rewards_R, values_RT, is_sampled_RT, self._gae_lambda
        )
        counts_RT = is_sampled_RT & counts_R[:, None]
        if not counts_RT.any():
            return gains_RT, {}
        returns, counted = returns_RT[counts_RT], gains_RT[counts_RT]
        self._fit(tree, placed, returns_RT, counts_RT)
        spread = returns.var()
        figures = {"rl/value": float(values_RT[counts_RT].mean())}
        if spread > 0.0:
            error = np.square(returns - values_RT[counts_RT]).mean()
            figures["rl/explained_variance"] = float(1.0 - error / spread)
        return (gains_RT - counted.mean()) / (counted.std() + 1e-6), figures

    def _fit(
        self,
        tree: Parameters,
        placed: Sequence[Batch[jax.Array]],
        returns_RT: np.ndarray,
        counts_RT: np.ndarray,
    ) -> None:
        squares_EE, products_E, first = 0.0, 0.0, 0
        for part in placed:
            rows = slice(first, first := first + part.tokens.shape[0])
            given = (returns_RT[rows].astype(np.float32), counts_RT[rows].astype(np.float32))
            found = self._moments(tree, part, *given)
            squares_EE += np.asarray(found[0], np.float64)
            products_E += np.asarray(found[1], np.float64)
        ridge = _RIDGE * np.trace(squares_EE) / len(self.weights_E)
        held_EE = squares_EE + ridge * np.eye(len(self.weights_E))
        error_E = products_E - squares_EE @ self.weights_E
        self.weights_E = self.weights_E + np.linalg.solve(held_EE, error_E)


def _features(model: ModelDefinition, tree: Parameters, batch: Batch[Any]) -> Float[Array, "B T E"]:
    decoder = model.bind(tree)
    x_BTD = model.execution.policy.to_accum(
        decoder.hidden(batch.tokens, segment_ids=batch.segment_ids)
    )
    return jnp.concatenate([x_BTD, jnp.ones_like(x_BTD[..., :1])], axis=-1)


def _make_values(model: ModelDefinition) -> Any:
    def values(tree: Parameters, batch: Batch[Any], head_E: jax.Array) -> jax.Array:
        return jnp.sum(_features(model, tree, batch) * head_E[None, None], axis=-1)

    return values


def _make_moments(model: ModelDefinition) -> Any:
    """Sums over counted tokens of the outer products of features, and of features times returns."""

    def moments(
        tree: Parameters, batch: Batch[Any], returns_BT: jax.Array, counts_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x_BTE = _features(model, tree, batch)
        counted_BTE = x_BTE * counts_BT[..., None]
        high = jax.lax.Precision.HIGHEST
        squares_EE = jnp.einsum("bte,btf->ef", counted_BTE, x_BTE, precision=high)
        return squares_EE, jnp.einsum("bte,bt->e", counted_BTE, returns_BT, precision=high)

    return moments
