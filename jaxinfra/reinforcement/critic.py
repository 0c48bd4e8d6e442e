"""The value head of PPO: expected rewards as a linear function of the policy's hidden states.

Dims: R completion of a rollout, B completion of a part of it, T position, D hidden, E hidden and 1.
"""

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged
from jaxinfra.training.job import Job
from jaxinfra.training.state import State

_RIDGE = 0.1  # weight of the squared change of the head, in parts of a feature's mean square


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
    x_BTD = model.execution.policy.to_accum(decoder.hidden(batch.tokens))
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
