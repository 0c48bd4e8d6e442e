"""The pure training step: (state, batch) -> (state, metrics).

Dims: B sequence of the batch, T position, K micro-batch.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxinfra.config.precision import PrecisionConfig
from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.models.definition import ModelDefinition, Parameters
from jaxinfra.numerics.loss_scale import next_loss_scale
from jaxinfra.ops.cross_entropy import CrossEntropySums, linear_cross_entropy
from jaxinfra.training.state import State, TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What a step reports, fp32 and int32 scalars."""

    loss: jax.Array  # nats a counted token, without z-loss
    gradient_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    loss_scale: jax.Array
    tokens: jax.Array  # counted targets
    skipped: jax.Array  # steps not applied so far
    skipped_in_a_row: jax.Array


type TrainStep = Callable[[State, Batch], tuple[State, StepMetrics]]


def batch_loss(
    model: ModelDefinition,
    parameters: Parameters,
    batch: Batch,
    *,
    z_loss: float,
    dropout_key: jax.Array | None = None,
) -> CrossEntropySums:
    """Sums over the batch's counted targets; divide by their number for means."""
    decoder = model.bind(parameters)
    hidden_BTD = decoder.hidden(
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout_key=dropout_key,
    )
    with jax.named_scope("loss"):
        return linear_cross_entropy(
            hidden_BTD,
            decoder.vocabulary_table,
            batch.targets,
            batch.weights,
            z_loss=z_loss,
            logit_soft_cap=model.config.logit_soft_cap,
            batch_shards=model.execution.constrain.batch_shards,
        )


def make_train_step(
    model: ModelDefinition,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: optax.Schedule,
    training: TrainingConfig,
    precision: PrecisionConfig,
) -> TrainStep:
    """Builds the step; jit it with the state donated.

    With K micro-batches the gradient equals the whole batch's: every micro-batch is divided by the
    number of counted targets of the whole batch, and gradients are summed in place, so peak memory
    does not grow with K. A step whose loss or gradient is not finite changes nothing but the
    counters and the loss scale.
    """
    drops_out = model.config.dropout_rate > 0.0

    def gradient(
        state: State, batch: Batch, key: jax.Array, num_targets: jax.Array
    ) -> tuple[jax.Array, Parameters]:
        """Mean nll and the loss-scaled gradient of this part of the batch."""

        def scaled_loss(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
            sums = batch_loss(
                model,
                parameters,
                batch,
                z_loss=training.z_loss,
                dropout_key=key if drops_out else None,
            )
            return sums.total * (state.loss_scale.value / num_targets), sums.nll / num_targets

        (_, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(state.parameters)
        return loss, gradients

    def accumulated(
        state: State, batch: Batch, key: jax.Array, num_targets: jax.Array
    ) -> tuple[jax.Array, Parameters]:
        if training.accumulation == 1:
            return gradient(state, batch, key, num_targets)

        def add(sums: tuple[jax.Array, Parameters], micro: tuple[Batch, jax.Array]):
            part = gradient(state, micro[0], micro[1], num_targets)
            return jax.tree.map(jnp.add, sums, part), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.parameters))
        keys = jax.random.split(key, training.accumulation)
        micro_batches = split_batch(batch, training.accumulation)
        return jax.lax.scan(add, zeros, (micro_batches, keys))[0]

    def train_step(state: State, batch: Batch) -> tuple[State, StepMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        num_targets = jnp.maximum(jnp.sum(batch.weights), 1.0)
        loss, gradients = accumulated(state, batch, key, num_targets)
        with jax.named_scope("optimizer"):
            gradients = jax.tree.map(lambda g: g / state.loss_scale.value, gradients)
            norm = optax.tree_utils.tree_norm(gradients)
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            updates, moments = optimizer.update(gradients, state.optimizer, state.parameters)
            parameters = optax.apply_updates(state.parameters, updates)

            def applied(new, old):
                return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

            skip = jnp.where(finite, 0, 1)
            new_state = TrainState(
                step=state.step + 1,
                skipped=state.skipped + skip,
                skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
                parameters=applied(parameters, state.parameters),
                optimizer=applied(moments, state.optimizer),
                loss_scale=next_loss_scale(state.loss_scale, finite=finite, config=precision),
                rng=state.rng,
            )
        metrics = StepMetrics(
            loss=loss,
            gradient_norm=norm,
            learning_rate=jnp.asarray(learning_rate(state.step - state.skipped), jnp.float32),
            loss_scale=state.loss_scale.value,
            tokens=jnp.sum(batch.weights),
            skipped=new_state.skipped,
            skipped_in_a_row=new_state.skipped_in_a_row,
        )
        return new_state, metrics

    return train_step


def split_batch(batch: Batch, num_parts: int) -> Batch:
    """[B, ...] to [K, B/K, ...]: part k takes rows k, k+K, ... so that a batch sharded over
    devices splits without moving rows between them.
    """

    def split(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def make_evaluation_step(
    model: ModelDefinition,
) -> Callable[[Parameters, Batch], tuple[jax.Array, jax.Array]]:
    """(parameters, batch) -> (sum of nll in nats, number of counted targets)."""

    def evaluation_step(parameters: Parameters, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return batch_loss(model, parameters, batch, z_loss=0.0).nll, jnp.sum(batch.weights)

    return evaluation_step
