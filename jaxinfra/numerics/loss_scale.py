"""Loss scaling keeps small fp16 gradients representable (Micikevicius et al. 2018, 3.2)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxinfra.config.precision import LossScaling, PrecisionConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossScale[Leaf]:
    """The factor on the loss, and the number of finite steps since the factor last changed."""

    value: Leaf  # float32 []
    finite_steps: Leaf  # int32 []


def initial_loss_scale(config: PrecisionConfig) -> LossScale[jax.Array]:
    """Returns the loss scale of the first step: 1 without scaling, else the configured one."""
    value = 1.0 if config.loss_scaling is LossScaling.NONE else config.initial_loss_scale
    return LossScale(value=jnp.float32(value), finite_steps=jnp.int32(0))


def next_loss_scale(
    scale: LossScale[jax.Array], *, finite: Bool[Array, ""], config: PrecisionConfig
) -> LossScale[jax.Array]:
    """Returns the scale after a step; static scales never change.

    Dynamic scales halve after a non-finite step (not below 1), and double after ``growth_interval``
    finite ones.
    """
    if config.loss_scaling is not LossScaling.DYNAMIC:
        return scale
    grown = scale.finite_steps + 1 >= config.growth_interval
    after_finite = jnp.where(grown, scale.value * 2.0, scale.value)
    # A doubling that would itself overflow is not taken.
    after_finite = jnp.where(jnp.isfinite(after_finite), after_finite, scale.value)
    return LossScale(
        value=jnp.where(finite, after_finite, jnp.maximum(scale.value / 2.0, 1.0)),
        finite_steps=jnp.where(finite & ~grown, scale.finite_steps + 1, 0),
    )
