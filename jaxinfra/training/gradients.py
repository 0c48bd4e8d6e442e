"""Functions that compute the loss and the gradients of a batch for the training step.

Dims: B sequence of the batch, T position, K micro-batch.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxinfra.config.parts import find_part
from jaxinfra.config.preferences import PreferenceConfig, PreferenceLoss
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import ModelDefinition, Parameters, merged, only
from jaxinfra.model.gradients import Gradients, added, nothing_added
from jaxinfra.model.passes import PREDICTION, Sums, joined
from jaxinfra.numerics.storage import exact
from jaxinfra.ops.cross_entropy import CrossEntropySums
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.reduction import sum_gradients_once
from jaxinfra.training.policy import policy_sums
from jaxinfra.training.preferences import count_pairs, pair_sums, target_values


@dataclasses.dataclass(frozen=True, eq=False)
class GradientFunction(abc.ABC):
    """Base class of functions that compute the loss and the gradients of a batch.

    All take their arguments in one order: parameters, the model's state, the batch, then keywords.
    """

    model: ModelDefinition
    _: dataclasses.KW_ONLY
    training: TrainingConfig

    @abc.abstractmethod
    def __call__(
        self,
        parameters: Parameters,
        state: Parameters,
        batch: Batch,
        *,
        key: Key[Array, ""],
        loss_scale: Float[Array, ""],
    ) -> Gradients:
        """Differentiates the batch's mean objective: nll, smoothing, z-loss and layers' losses.

        Args:
            parameters: trained ones.
            state: of the model.
            batch: rows [B, T], the whole batch.
            key: of this step; dropout folds its own from it.
            loss_scale: factor of the objective.
        """

    def counted(self, batch: Batch) -> Float[Array, ""]:
        """Sums the weights of a batch's targets."""
        return jnp.sum(batch.weights)

    def of(self, model: ModelDefinition) -> Self:
        """Returns a copy of this gradient function for another model, such as a model whose frozen
        parameters are bound.
        """
        return dataclasses.replace(self, model=model)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSums:
    """Loss sums over a batch's counted targets or, in preference training, over its pairs of
    answers, or over completions. Dividing by the number of targets or pairs gives means.
    """

    objective: Float[Array, ""]  # the sum that is differentiated
    nll: Float[Array, ""]  # with pairs, the sum of their preference losses
    layers: Any  # statistics that layers emit, as ``Gradients.sums``
    figures: dict[str, Float[Array, ""]]  # logged sums over pairs; empty without pairs


def batch_loss(
    model: ModelDefinition,
    tree: Parameters,
    batch: Batch,
    *,
    z_loss: float,
    label_smoothing: float = 0.0,
    loss: str | None = None,
    preferences: PreferenceConfig | None = None,
    rl: RlConfig | None = None,
    sequence_shards: int = 1,
    per_token: Float[Array, ""] | None = None,
    dropout_key: Key[Array, ""] | None = None,
) -> BatchSums:
    """Computes the training objective of a batch of tokens or of answer pairs; ``tree`` has the
    model's parameters and state.

    Args:
        loss: name of the user's loss function (``jaxinfra.part``) in place of the cross entropy;
            ``nll`` is then its sum.
        preferences: settings of the preference loss, if the batch has pairs of answers.
        rl: settings of the policy loss, if the batch has completions that the model sampled.
        sequence_shards: number of devices that each sequence is sharded over; used with pairs.
        per_token: weight of losses that layers add, such as balance losses: counted targets or
            pairs per token of the whole batch, so that they become means over tokens; None: 1.
    """
    decoder, is_of_tokens = model.bind(tree), preferences is None and rl is None
    out = decoder.run(
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout_key=dropout_key,
        behind=decoder.vocabulary_table if is_of_tokens and loss is None else None,
    )
    layers = out.sums
    if is_of_tokens:
        options = {"z_loss": z_loss, "label_smoothing": label_smoothing, "loss": loss}
        of_hidden = functools.partial(hidden_loss, model, tree, table=out.behind, **options)
        sums = of_hidden(out.x, batch)
        objective, nll, figures = sums.total, sums.nll, {}
        if decoder.mtp is not None and model.lora is None:
            layers = (*layers, _prediction_sums(decoder, out.x, batch, of_hidden))
    else:
        if preferences is not None:
            _require_reference(preferences, batch)
        each_BT = target_values(model, tree, out.x, batch.targets, sequence_shards=sequence_shards)
        with jax.named_scope("loss"):
            if rl is not None:
                found = policy_sums(each_BT, batch, rl)
            else:
                assert preferences is not None
                found = pair_sums(each_BT, batch, preferences)
        objective, nll, figures = found.loss, found.loss, found.figures
    for name, emitted in [pair for block in layers for pair in block.losses.items()]:
        added_loss = jnp.sum(emitted)
        if per_token is not None and name != PREDICTION:
            added_loss = added_loss * per_token
        objective = objective + added_loss
    return BatchSums(objective=objective, nll=nll, layers=layers, figures=figures)


def _prediction_sums(
    decoder: Decoder,
    hidden_BTD: jax.Array,
    batch: Batch,
    of_hidden: Callable[[jax.Array, Batch], CrossEntropySums],
) -> Sums:
    """Returns the sums of multi-token prediction: the loss of the token after each target's.

    Args:
        of_hidden: the loss of normalized hidden states.
    """
    segments_BT, weights_BT = batch.segment_ids, _ahead(batch.weights)
    if segments_BT is not None:
        weights_BT = jnp.where(segments_BT == _ahead(segments_BT), weights_BT, 0.0)
    given = {"positions": batch.positions, "segment_ids": segments_BT}
    out = decoder.predict(hidden_BTD, _ahead(batch.tokens), **given)
    ahead = dataclasses.replace(batch, targets=_ahead(batch.targets), weights=weights_BT)
    weighed = decoder.config.mtp_weight * of_hidden(out.x, ahead).total
    return joined(out.sums, Sums(losses={PREDICTION: weighed[None]}))


def _ahead(x_BT: jax.Array) -> jax.Array:
    """Returns what the position after each has, and 0 at the last one."""
    return jnp.concatenate([x_BT[:, 1:], jnp.zeros_like(x_BT[:, :1])], axis=1)


def _require_reference(preferences: PreferenceConfig, batch: Batch) -> None:
    if preferences.has_reference != (batch.reference is not None):
        raise ConfigError(
            f"preferences loss={preferences.loss.value} with a batch "
            f"{'without' if batch.reference is None else 'of'} reference log probabilities: "
            "take batches from Steps.batches, or train"
        )


def hidden_loss(
    model: ModelDefinition,
    parameters: Parameters,
    hidden_BTD: Float[Array, "B T D"],
    batch: Batch,
    *,
    z_loss: float,
    label_smoothing: float,
    loss: str | None,
    table: Float[Array, "V D"] | None = None,
) -> CrossEntropySums:
    """Computes the loss of a batch's tokens from the normalized output of the last layer.

    Args:
        loss: the user's function in place of the cross entropy. It gets all logits of a
            micro-batch: ``(logits [B, T, V], targets [B, T], *, weights) -> [B, T]`` in fp32.
        table: vocabulary matrix as ``Decoder.run`` returns it; by default that of ``parameters``.
    """
    decoder = model.bind(parameters)
    if table is None and loss is None:
        table = decoder.vocabulary_table
    with jax.named_scope("loss"):
        if table is not None:
            if decoder.logit_bias is not None:
                hidden_BTD, table = with_bias(hidden_BTD, table, decoder.logit_bias[...])
            return model.execution.kernels.cross_entropy(
                hidden_BTD,
                table,
                batch.targets,
                batch.weights,
                policy=model.execution.policy,
                z_loss=z_loss,
                label_smoothing=label_smoothing,
                logit_soft_cap=model.config.logit_soft_cap,
            )
        logits_BTV = decoder.logits(hidden_BTD)
        assert loss is not None
        each_BT = find_part(loss)(logits_BTV, batch.targets, weights=batch.weights)
        if each_BT.shape != batch.targets.shape:
            raise ConfigError(
                f"loss {loss} returns {each_BT.shape} for targets of {batch.targets.shape}; it "
                "gives each token's loss, which is weighed and averaged here"
            )
        total = jnp.sum(each_BT.astype(batch.weights.dtype) * batch.weights)
    return CrossEntropySums(total, total)


_BIAS_COLUMNS = 128
"""Columns that hold a bias of logits in one of them: as many as loss kernels read at a time."""


def with_bias(
    hidden_BTD: jax.Array, table_VD: jax.Array, bias_V: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Appends columns to hidden states and vocabulary so that their product has the bias in it."""
    unit = jnp.zeros(_BIAS_COLUMNS, hidden_BTD.dtype).at[0].set(1)
    ones = jnp.broadcast_to(unit[None, None], (*hidden_BTD.shape[:2], _BIAS_COLUMNS))
    biases = bias_V.astype(table_VD.dtype)[:, None] * unit.astype(table_VD.dtype)[None]
    return (
        jnp.concatenate([hidden_BTD, ones], axis=-1),
        jnp.concatenate([table_VD, biases], axis=-1),
    )


@final
@dataclasses.dataclass(frozen=True, eq=False)
class AccumulatedGradient(GradientFunction):
    """A gradient function that sums a batch's gradients over ``training.accumulation``
    micro-batches.

    The sum equals the big batch's gradient: every micro-batch is divided by the number of counted
    targets of the whole batch, and gradients are summed in place, so peak memory does not grow
    with K.

    On a mesh, replicated gradients are all-reduced once, after the last micro-batch. Sharded
    gradients (fsdp axis, ZeRO 2 and 3) are reduce-scattered after each micro-batch, so no device
    ever holds the whole sum.
    """

    placement: Placement | None = None  # shardings of the state on the mesh
    preferences: PreferenceConfig | None = None  # preference loss, if batches have pairs of answers
    rl: RlConfig | None = None  # policy loss, if batches have completions that the model sampled

    def __call__(
        self,
        parameters: Parameters,
        state: Parameters,
        batch: Batch,
        *,
        key: Key[Array, ""],
        loss_scale: Float[Array, ""],
    ) -> Gradients:
        """Sums the gradients of all micro-batches, over all devices."""
        terms = count_targets(batch) if self.preferences is None else count_pairs(batch)
        per_token = terms / count_tokens(batch)
        total, placement = self._accumulated, self.placement
        # kto compares the rows of all devices with one another in each micro-batch.
        is_kto = self.preferences is not None and self.preferences.loss is PreferenceLoss.KTO
        if placement is not None and not is_kto:
            axes = placement.deferred_sum_axes(self.model, accumulation=self.training.accumulation)
            if axes:
                total = sum_gradients_once(total, placement=placement, model=self.model, axes=axes)
        return total(parameters, state, batch, key, loss_scale, terms, per_token)

    def counted(self, batch: Batch) -> Float[Array, ""]:
        """Sums the weights of a batch's targets. Those of answers are counted: their weights are
        marks, such as kto's 2 of bad ones.
        """
        if self.preferences is None:
            return super().counted(batch)
        return jnp.sum((batch.weights > 0.0).astype(batch.weights.dtype))

    def _accumulated(
        self,
        parameters: Parameters,
        state: Parameters,
        batch: Batch,
        key: Key[Array, ""],
        loss_scale: Float[Array, ""],
        terms: Float[Array, ""],
        per_token: Float[Array, ""],
    ) -> Gradients:
        """The sum over micro-batches, of this device's rows where devices run apart."""
        model, num_parts = self.model, self.training.accumulation
        # Once for all micro-batches, and gradients are summed from what matmuls hand on. A loop
        # over layers rounds one layer at a time instead: a copy of all would cost it memory.
        is_unrolled = model.execution.recomputation.unroll >= max(model.config.repeats)
        read = model.as_read(parameters) if is_unrolled else parameters

        def part(batch: Batch, key: jax.Array) -> Gradients:
            found = self._micro_batch(read, state, batch, key, loss_scale, terms, per_token)
            gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), found.gradients, parameters)
            return dataclasses.replace(found, gradients=gradients)

        if num_parts == 1:
            return part(batch, key)
        # Traced once: for the shapes of the sums, and kept as the body of the loop.
        kept = jax.jit(part, inline=True)

        def add(sums: Gradients, micro: tuple[Batch, jax.Array]):
            found = kept(*micro)
            # Summed in fp32, whatever the weights are kept in.
            return added(sums, dataclasses.replace(found, gradients=exact(found.gradients))), None

        micro = split_batch(batch, num_parts), jax.random.split(key, num_parts)
        shapes = jax.eval_shape(kept, *jax.tree.map(lambda leaf: leaf[0], micro))
        zeros = exact(jax.tree.map(jnp.zeros_like, parameters))
        start = dataclasses.replace(nothing_added(shapes), gradients=self._placed(zeros))
        return jax.lax.scan(add, start, micro)[0]

    def _micro_batch(
        self,
        parameters: Parameters,
        state: Parameters,
        batch: Batch,
        key: Key[Array, ""],
        loss_scale: Float[Array, ""],
        terms: Float[Array, ""],
        per_token: Float[Array, ""],
    ) -> Gradients:
        """One micro-batch's share of the mean over ``terms``: counted targets, or pairs."""
        model, training = self.model, self.training

        def scaled_loss(trained: tuple[Parameters, Parameters]) -> tuple[jax.Array, Any]:
            sums = batch_loss(
                model,
                merged(*trained),
                batch,
                z_loss=training.z_loss,
                label_smoothing=training.label_smoothing,
                loss=training.loss,
                preferences=self.preferences,
                rl=self.rl,
                sequence_shards=1 if self.placement is None else self.placement.sequence_shards,
                per_token=per_token,
                dropout_key=key if model.drops_out else None,
            )
            aux = sums.nll / terms, sums.layers, sums.figures
            return sums.objective * (loss_scale / terms), aux

        (_, (loss, sums, figures)), (gradients, emitted) = jax.value_and_grad(
            scaled_loss, has_aux=True
        )((parameters, state))
        return Gradients(
            loss=loss, gradients=self._placed(gradients), sums=sums, state=emitted, figures=figures
        )

    def _placed(self, gradients: Parameters) -> Parameters:
        if self.placement is None:
            return gradients
        return jax.lax.with_sharding_constraint(gradients, self.placement.gradients(self.model))


def count_targets(batch: Batch) -> Float[Array, ""]:
    """Sums the weights of a batch's targets; returns 1 for 0, as loss sums are divided by it."""
    total = jnp.sum(batch.weights)
    return jnp.where(total > 0.0, total, 1.0)


def count_tokens(batch: Batch) -> Float[Array, ""]:
    """Counts the tokens of a batch that are no padding, whether their targets count or not; returns
    at least 1, as losses of layers are divided by it.
    """
    weights_BT, segments_BT = batch.weights, batch.segment_ids
    is_read_BT = jnp.ones_like(weights_BT) if segments_BT is None else segments_BT >= 0
    return jnp.maximum(jnp.sum(is_read_BT.astype(weights_BT.dtype)), 1.0)


def split_batch(batch: Batch, num_parts: int) -> Batch:
    """Splits a batch [B, ...] into micro-batches [K, B/K, ...]. Micro-batch k takes rows k, k+K,
    ... so that no row moves between devices.
    """

    def split(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def make_evaluation_step(
    model: ModelDefinition,
) -> Callable[[Parameters, Batch], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Builds the evaluation step: (parameters and state, batch) -> (sum of nll in nats, number of
    counted targets).

    Its matmuls are never in 8 bits, even where the model trains in 8 bits.
    """
    evaluated = model.unquantized

    def evaluation_step(
        tree: Parameters, batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        tree = only(tree, evaluated.arrays)
        return batch_loss(evaluated, tree, batch, z_loss=0.0).nll, jnp.sum(batch.weights)

    return evaluation_step


def make_target_value_step(
    model: ModelDefinition, *, sequence_shards: int = 1
) -> Callable[[Parameters, Batch], Float[Array, "B T"]]:
    """Builds the step (parameters and state, batch) -> ``target_values``."""
    evaluated = model.unquantized

    def target_value_step(tree: Parameters, batch: Batch) -> Float[Array, "B T"]:
        tree = only(tree, evaluated.arrays)
        hidden_BTD = evaluated.bind(tree).hidden(
            batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions
        )
        return target_values(
            evaluated, tree, hidden_BTD, batch.targets, sequence_shards=sequence_shards
        )

    return target_value_step
