"""The optimizer: clipping by global norm, then AdamW with decay on matrices only."""

from typing import Any

import jax
import optax

from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.core.axes import HEAD, LAYERS, Dims
from jaxinfra.optim.learning_rate import learning_rate
from jaxinfra.optim.promotion import standard_promotion


def make_optimizer(
    config: OptimizerConfig, *, dims: Any, steps: int
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) over fp32 parameters.

    theta -= lr * (m_hat / (sqrt(v_hat) + epsilon) + weight_decay * theta), decay on matrices only.

    Args:
        dims: tree of ``DimsLeaf``: which parameters are matrices follows from their logical dims.
        steps: length of the run, for the schedule.
    """
    clip = (
        optax.identity()
        if config.clip_norm is None
        else optax.clip_by_global_norm(config.clip_norm)
    )
    chain = optax.chain(
        clip,
        optax.adamw(
            learning_rate(config, steps=steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=jax.tree.map(lambda leaf: is_matrix(leaf.dims), dims),
        ),
    )
    return optax.GradientTransformationExtraArgs(chain.init, standard_promotion(chain.update))


def is_matrix(dims: Dims) -> bool:
    """Whether a parameter maps one space into another: not a norm's scale, nor a bias.

    Stacking over layers and splitting a width into heads add dims without making a matrix: a query
    bias is [layers, heads, head] and is none.
    """
    return len([dim for dim in dims if dim not in (LAYERS, HEAD)]) >= 2
