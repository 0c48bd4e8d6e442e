"""Loss and gradients of a batch: what a training step differentiates.

Dims: B sequence of the batch, T position, K micro-batch.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.models.definition import ModelDefinition, Parameters
from jaxinfra.ops.cross_entropy import CrossEntropySums, linear_cross_entropy
from jaxinfra.parallel.loss import cross_entropy_of_own_tokens, takes_own_tokens
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.reduction import summed_once


class GradientFunction(Protocol):
    """How a step gets its gradients: accumulation, a pipeline, ... all have this form."""

    def __call__(
        self, parameters: Parameters, batch: Batch, *, key: jax.Array, loss_scale: jax.Array
    ) -> tuple[jax.Array, Parameters]:
        """Mean nll in nats a counted token of the whole batch, and gradients in the parameters'
        dtypes, of the mean objective (nll, smoothed, and z-loss) times ``loss_scale``.

        Args:
            key: of this step; dropout folds its own from it.
            loss_scale: fp32 scalar.
        """
        ...


def batch_loss(
    model: ModelDefinition,
    parameters: Parameters,
    batch: Batch,
    *,
    z_loss: float,
    label_smoothing: float = 0.0,
    dropout_key: jax.Array | None = None,
    placement: Placement | None = None,
) -> CrossEntropySums:
    """Sums over the batch's counted targets; divide by their number for means.

    Args:
        placement: of the batch, on a mesh.
    """
    decoder = model.bind(parameters)
    hidden_BTD = decoder.hidden(
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout_key=dropout_key,
    )
    return hidden_loss(
        model,
        parameters,
        hidden_BTD,
        batch,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        placement=placement,
    )


def hidden_loss(
    model: ModelDefinition,
    parameters: Parameters,
    hidden_BTD: jax.Array,
    batch: Batch,
    *,
    z_loss: float,
    label_smoothing: float,
    placement: Placement | None,
) -> CrossEntropySums:
    """``batch_loss`` from the normalized output of the last layer on; of ``parameters`` it reads
    the vocabulary's table.
    """
    decoder = model.bind(parameters)
    with jax.named_scope("loss"):
        if placement is not None:
            table_VD = decoder.vocabulary_table
            if takes_own_tokens(placement, hidden_BTD, num_ids=table_VD.shape[0]):
                return cross_entropy_of_own_tokens(
                    placement,
                    hidden_BTD,
                    table_VD,
                    batch.targets,
                    batch.weights,
                    compute=model.execution.policy.compute,
                    gradient=model.execution.policy.gradient,
                    z_loss=z_loss,
                    label_smoothing=label_smoothing,
                    logit_soft_cap=model.config.logit_soft_cap,
                )
        return linear_cross_entropy(
            hidden_BTD,
            decoder.gathered_table,
            batch.targets,
            batch.weights,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
            logit_soft_cap=model.config.logit_soft_cap,
            batch_shards=model.execution.constrain.batch_shards,
            sequence_shards=model.execution.constrain.sequence_shards,
            num_devices=model.execution.constrain.num_devices,
        )


def make_gradient(
    model: ModelDefinition, *, training: TrainingConfig, placement: Placement | None = None
) -> GradientFunction:
    """The gradient of the whole batch, in ``training.accumulation`` micro-batches.

    It equals the big batch's: every micro-batch is divided by the number of counted targets of the
    whole batch, and gradients are summed in place, so peak memory does not grow with K.

    On a mesh, devices communicate gradients once, after the last micro-batch, over all axes where
    gradients are whole; where they are sharded (fsdp from ZeRO 2 on), each micro-batch's are
    reduce-scattered, as no device has room for all of them.

    Args:
        placement: of the state, on a mesh.
    """
    last = () if placement is None else placement.summed_last(accumulation=training.accumulation)
    drops_out = model.config.dropout_rate > 0.0

    def gradient(
        parameters: Parameters, batch: Batch, key: jax.Array, loss_scale: jax.Array, num_targets
    ) -> tuple[jax.Array, Parameters]:
        """This part of the batch's share of the mean."""

        def scaled_loss(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
            sums = batch_loss(
                model,
                parameters,
                batch,
                z_loss=training.z_loss,
                label_smoothing=training.label_smoothing,
                dropout_key=key if drops_out else None,
                placement=placement,
            )
            return sums.total * (loss_scale / num_targets), sums.nll / num_targets

        (_, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(parameters)
        return loss, placed(gradients)

    def placed(gradients: Parameters) -> Parameters:
        if placement is None:
            return gradients
        return jax.lax.with_sharding_constraint(gradients, placement.gradients(model))

    def accumulated(
        parameters: Parameters, batch: Batch, key: jax.Array, loss_scale: jax.Array, num_targets
    ) -> tuple[jax.Array, Parameters]:
        """The sum over micro-batches."""
        if training.accumulation == 1:
            return gradient(parameters, batch, key, loss_scale, num_targets)

        def add(sums: tuple[jax.Array, Parameters], micro: tuple[Batch, jax.Array]):
            part = gradient(parameters, micro[0], micro[1], loss_scale, num_targets)
            return jax.tree.map(jnp.add, sums, part), None

        zeros = (jnp.zeros_like(num_targets), placed(jax.tree.map(jnp.zeros_like, parameters)))
        keys = jax.random.split(key, training.accumulation)
        micro_batches = split_batch(batch, training.accumulation)
        return jax.lax.scan(add, zeros, (micro_batches, keys))[0]

    if last:
        assert placement is not None
        total = summed_once(accumulated, placement=placement, model=model, axes=last)
    else:
        total = accumulated

    def of_batch(
        parameters: Parameters, batch: Batch, *, key: jax.Array, loss_scale: jax.Array
    ) -> tuple[jax.Array, Parameters]:
        return total(parameters, batch, key, loss_scale, count_targets(batch))

    return of_batch


def count_targets(batch: Batch) -> jax.Array:
    """Counted targets of a batch, at least 1: what its sums are divided by."""
    return jnp.maximum(jnp.sum(batch.weights), 1.0)


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
