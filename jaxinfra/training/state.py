"""The training state: everything that a step changes, as one pytree; checkpoints hold it."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxinfra.config.precision import PrecisionConfig
from jaxinfra.model.definition import ModelDefinition, Parameters, merged
from jaxinfra.numerics.loss_scale import LossScale, initial_loss_scale
from jaxinfra.parallel.place import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainState[Leaf]:
    """The training state after ``step`` batches: parameters, optimizer state and counters. Its
    leaves may also be their shapes or shardings.
    """

    step: Leaf  # int32 [], batches consumed
    skipped: Leaf  # int32 [], batches whose step was not applied because it was not finite
    skipped_in_a_row: Leaf  # int32 []
    parameters: Parameters
    model_state: Parameters  # arrays that layers update by rules of their own; often empty
    optimizer: optax.OptState
    loss_scale: LossScale[Leaf]
    rng: Leaf  # uint32 [2], key data; a step's keys are folded from it and ``step``
    # The running mean of the parameters, if ``optimizer.average`` is set; else empty.
    average: Parameters = dataclasses.field(default_factory=dict)

    @property
    def tree(self) -> Parameters:
        """Parameters and state of the model in one tree, as ``ModelDefinition.bind`` takes them."""
        return merged(self.parameters, self.model_state)

    @property
    def evaluated(self) -> Parameters:
        """Parameters and state of the model for evaluation. The parameters are their running mean
        if the optimizer keeps one.
        """
        return merged(self.average or self.parameters, self.model_state)


type State = TrainState[jax.Array]


def state_around(
    parameters: Parameters,
    model_state: Parameters,
    optimizer: optax.GradientTransformation,
    *,
    precision: PrecisionConfig,
    seed: int,
    averages: bool = False,
) -> State:
    """Makes the training state of step 0 from given parameters and model state.

    Args:
        averages: keep a running mean of the parameters, which begins at ``parameters``.
    """
    _, rng = jax.random.split(jax.random.key(seed))
    zero = jnp.int32(0)
    return TrainState(
        step=zero,
        skipped=zero,
        skipped_in_a_row=zero,
        parameters=parameters,
        model_state=model_state,
        optimizer=optimizer.init(parameters),
        loss_scale=initial_loss_scale(precision),
        rng=jax.random.key_data(rng),
        average=parameters if averages else {},
    )


def state_shardings(
    model: ModelDefinition,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    averages: bool = False,
) -> TrainState[NamedSharding]:
    """Returns the shardings of a TrainState: moments and means as their parameters, scalars
    replicated.
    """
    whole = placement.replicated
    return TrainState(
        step=whole,
        skipped=whole,
        skipped_in_a_row=whole,
        parameters=placement.parameters(model),
        model_state=placement.model_state(model),
        optimizer=placement.optimizer(optimizer, model),
        loss_scale=LossScale(value=whole, finite_steps=whole),
        rng=whole,
        average=placement.parameters(model) if averages else {},
    )
