"""The optimizer: clipping by global norm, then AdamW or Muon with decay on matrices only."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxinfra.axes import Dims
from jaxinfra.config.optimizer import MuonConfig, OptimizerConfig, OptimizerKind
from jaxinfra.numerics.storage import exact
from jaxinfra.training.optim.adafactor import scale_by_adafactor
from jaxinfra.training.optim.learning_rate import learning_rate
from jaxinfra.training.optim.muon import is_hidden_matrix, is_matrix, orthogonalized
from jaxinfra.training.optim.promotion import standard_promotion
from jaxinfra.training.optim.stored_adam import scale_by_stored_adam


def make_optimizer(
    config: OptimizerConfig, *, dims: Any, steps: int
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) over fp32 parameters, or Muon.

    theta -= lr * (m_hat / (sqrt(v_hat) + epsilon) + weight_decay * theta), decay on matrices only.
    With Muon, hidden matrices get ``orthogonalized`` in place of the quotient; Lion and Adafactor
    have their own, with the same rate and decay.

    Args:
        dims: tree of ``DimsLeaf``: which parameters are matrices follows from their logical dims.
        steps: length of the run, for the schedule.
    """
    clip = (
        optax.identity()
        if config.clip_norm is None
        else optax.clip_by_global_norm(config.clip_norm)
    )
    rate = learning_rate(config, steps=steps)
    if config.muon is not None:
        chain = optax.chain(clip, _muon(config, config.muon, rate, dims))
    else:
        chain = optax.chain(clip, _CHAINS[config.kind](config, rate, dims))
    # Weights may be kept in fewer bits than moments and updates are computed in.
    return optax.GradientTransformationExtraArgs(
        lambda params: chain.init(exact(params)),
        standard_promotion(
            lambda updates, state, params=None, **extra: chain.update(
                exact(updates), state, exact(params), **extra
            )
        ),
    )


def _adamw(
    config: OptimizerConfig, rate: optax.Schedule, dims: Any
) -> optax.GradientTransformation:
    if config.keeps_short_moments:
        return optax.chain(
            scale_by_stored_adam(config),
            optax.add_decayed_weights(config.weight_decay, _where(is_matrix, dims)),
            optax.scale_by_learning_rate(rate),
        )
    return optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_where(is_matrix, dims),
    )


def _lion(config: OptimizerConfig, rate: optax.Schedule, dims: Any) -> optax.GradientTransformation:
    return optax.lion(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=_where(is_matrix, dims),
    )


def _adafactor(
    config: OptimizerConfig, rate: optax.Schedule, dims: Any
) -> optax.GradientTransformation:
    """With the paper's constants; rates of AdamW carry over."""
    return optax.chain(
        scale_by_adafactor(dims),
        optax.add_decayed_weights(config.weight_decay, _where(is_matrix, dims)),
        optax.scale_by_learning_rate(rate),
    )


_CHAINS = {
    OptimizerKind.ADAMW: _adamw,
    OptimizerKind.LION: _lion,
    OptimizerKind.ADAFACTOR: _adafactor,
}


def _muon(
    config: OptimizerConfig, muon: MuonConfig, rate: optax.Schedule, dims: Any
) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    return optax.chain(
        orthogonalized(muon, dims),
        optax.masked(adam, _where(lambda dims: not is_hidden_matrix(dims), dims)),
        optax.add_decayed_weights(config.weight_decay, _where(is_matrix, dims)),
        optax.masked(optax.scale(muon.rate), _where(is_hidden_matrix, dims)),
        optax.scale_by_learning_rate(rate),
    )


def _where(holds: Callable[[Dims], bool], dims: Any) -> Any:
    return jax.tree.map(lambda leaf: holds(leaf.dims), dims)
