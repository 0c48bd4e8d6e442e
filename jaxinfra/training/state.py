"""Everything that a training step changes, as one pytree: what a checkpoint holds."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxinfra.config.precision import PrecisionConfig
from jaxinfra.models.definition import ModelDefinition, Parameters
from jaxinfra.numerics.loss_scale import LossScale, initial_loss_scale
from jaxinfra.parallel.place import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainState[Leaf]:
    """Parameters, optimizer and counters after ``step`` batches, or something for each of them."""

    step: Leaf  # int32 [], batches consumed
    skipped: Leaf  # int32 [], of them not applied because not finite
    skipped_in_a_row: Leaf  # int32 []
    parameters: Parameters
    optimizer: optax.OptState
    loss_scale: LossScale[Leaf]
    rng: Leaf  # uint32 [2], key data; a step's keys are folded from it and ``step``


type State = TrainState[jax.Array]


def initial_state(
    model: ModelDefinition,
    optimizer: optax.GradientTransformation,
    *,
    precision: PrecisionConfig,
    seed: int,
) -> State:
    """Draws parameters and zeroes the rest; jit it with ``state_shardings`` as out_shardings."""
    init_key, _ = jax.random.split(jax.random.key(seed))
    parameters = model.initialize(init_key)
    return state_around(parameters, optimizer, precision=precision, seed=seed)


def state_around(
    parameters: Parameters,
    optimizer: optax.GradientTransformation,
    *,
    precision: PrecisionConfig,
    seed: int,
) -> State:
    """``initial_state`` with these parameters instead of random ones."""
    _, rng = jax.random.split(jax.random.key(seed))
    zero = jnp.int32(0)
    return TrainState(
        step=zero,
        skipped=zero,
        skipped_in_a_row=zero,
        parameters=parameters,
        optimizer=optimizer.init(parameters),
        loss_scale=initial_loss_scale(precision),
        rng=jax.random.key_data(rng),
    )


def state_shardings(
    model: ModelDefinition, optimizer: optax.GradientTransformation, placement: Placement
) -> TrainState[NamedSharding]:
    """A TrainState of shardings: moments lie as their parameters, scalars everywhere."""
    whole = placement.replicated
    return TrainState(
        step=whole,
        skipped=whole,
        skipped_in_a_row=whole,
        parameters=placement.parameters(model),
        optimizer=placement.optimizer(optimizer, model),
        loss_scale=LossScale(value=whole, finite_steps=whole),
        rng=whole,
    )
