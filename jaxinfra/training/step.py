"""The pure training step: (state, batch) -> (state, metrics)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from jaxinfra.config.precision import PrecisionConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import ModelDefinition, Parameters
from jaxinfra.model.gradients import Gradients
from jaxinfra.model.passes import PREDICTION, STATISTICS, Sums
from jaxinfra.numerics.loss_scale import next_loss_scale
from jaxinfra.numerics.storage import EXACT, after_update
from jaxinfra.training.gradients import GradientFunction, count_tokens
from jaxinfra.training.policy import policy_record
from jaxinfra.training.preferences import pair_record
from jaxinfra.training.state import State, TrainState
from jaxinfra.training.statistics import (
    StatisticsTable,
    emitted_by_site,
    fp8_record,
    parameter_statistics,
    statistics_record,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The metrics of a training step: fp32 and int32 scalars, and the statistics that layers
    emit.
    """

    loss: Float[Array, ""]  # nats per counted token, without z-loss
    gradient_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    loss_scale: Float[Array, ""]
    tokens: Float[Array, ""]  # counted targets
    tokens_read: Float[Array, ""]  # tokens that are no padding
    skipped: Int[Array, ""]  # steps not applied so far
    skipped_in_a_row: Int[Array, ""]
    sums: tuple[Sums, ...]  # statistics that layers emit, as ``Gradients.sums``
    fp8: dict[str, Float[Array, "..."]]  # statistics of 8-bit matmuls, as ``emitted_by_site``
    # Logged sums over answer pairs or completions, such as rewards; else empty.
    figures: dict[str, Float[Array, ""]] = dataclasses.field(default_factory=dict)
    # Result of ``parameter_statistics`` in a step with statistics; else empty.
    statistics: StatisticsTable = dataclasses.field(default_factory=dict)


_ROUNDING = 1 << 20
"""Folded into a step's key for the rounding of weights."""

type TrainStep = Callable[[State, Batch], tuple[State, StepMetrics]]


def make_train_step(
    gradient: GradientFunction,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: optax.Schedule,
    precision: PrecisionConfig,
    updates: Any = None,
    average: float | None = None,
    dims: Parameters | None = None,
    trained: Any = None,
) -> TrainStep:
    """Builds the training step (state, batch) -> (state, metrics); jit it with the state donated.

    If the loss or gradient is not finite, or no token of the batch counts, the step changes only
    the counters and the loss scale.

    Args:
        updates: shardings of the optimizer's update, a tree like the parameters. If the parameters
            are sharded less, each device updates its shard, and shards are then all-gathered.
        average: decay of the parameters' running mean; None: no mean is kept.
        dims: names of the parameters' dims; if given, the step computes parameter statistics.
        trained: tree of bools, False for each frozen parameter; None: all are trained.
    """
    update = functools.partial(
        _updated,
        optimizer=optimizer,
        precision=precision,
        model=gradient.model,
        updates=updates,
        average=average,
        dims=dims,
        trained=trained,
    )

    def train_step(state: State, batch: Batch) -> tuple[State, StepMetrics]:
        key, scale = step_key(state), state.loss_scale.value
        learned = gradient(state.parameters, state.model_state, batch, key=key, loss_scale=scale)
        counted = gradient.counted(batch)
        with jax.named_scope("optimizer"):
            new_state, norm, statistics = update(state, learned, counted, key)
        metrics = StepMetrics(
            loss=jnp.where(counted > 0, learned.loss, jnp.nan),  # the mean of nothing is no 0
            gradient_norm=norm,
            learning_rate=jnp.asarray(
                learning_rate(state.step - state.skipped), learned.loss.dtype
            ),
            loss_scale=scale,
            tokens=counted,
            tokens_read=count_tokens(batch),
            skipped=new_state.skipped,
            skipped_in_a_row=new_state.skipped_in_a_row,
            sums=learned.sums,
            fp8=emitted_by_site(learned.state),
            figures=learned.figures,
            statistics=statistics,
        )
        return new_state, metrics

    return train_step


def make_gradient_step(
    gradient: GradientFunction, *, trained: Any = None
) -> Callable[[State, Batch], Gradients]:
    """Builds the function (state, batch) -> gradients that a training step would apply, unscaled.

    Args:
        trained: as of ``make_train_step``.
    """

    def gradient_step(state: State, batch: Batch) -> Gradients:
        scale = state.loss_scale.value
        learned = gradient(
            state.parameters, state.model_state, batch, key=step_key(state), loss_scale=scale
        )
        found = unscaled(learned.gradients, scale, trained=trained)
        return dataclasses.replace(learned, gradients=found)

    return gradient_step


def _updated(
    state: State,
    learned: Gradients,
    counted: Float[Array, ""],
    key: Key[Array, ""],
    *,
    optimizer: optax.GradientTransformation,
    precision: PrecisionConfig,
    model: ModelDefinition,
    updates: Any,
    average: float | None,
    dims: Parameters | None,
    trained: Any,
) -> tuple[State, Float[Array, ""], StatisticsTable]:
    """The next state, the norm of the gradients, and statistics where they are asked for."""
    gradients, old = learned.gradients, state.parameters
    if updates is not None:
        gradients, old = jax.lax.with_sharding_constraint((gradients, old), (updates,) * 2)
    gradients = unscaled(gradients, state.loss_scale.value, trained=trained)
    norm = optax.tree_utils.tree_norm(gradients)
    finite = jnp.isfinite(learned.loss) & jnp.isfinite(norm)
    applies = finite & (counted > 0)
    steps, moments = optimizer.update(gradients, state.optimizer, old)
    parameters = _after_updates(old, steps, key)
    statistics: StatisticsTable = {}
    if dims is not None:
        statistics = parameter_statistics(dims, gradients=gradients, before=old, after=parameters)

    def applied(new, before):
        return jax.tree.map(lambda a, b: jnp.where(applies, a, b), new, before)

    skip = jnp.where(applies, 0, 1)
    new_state = TrainState(
        step=state.step + 1,
        skipped=state.skipped + skip,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        parameters=applied(parameters, old),
        model_state=applied(
            model.next_state(state.model_state, learned.sums, learned.state),
            state.model_state,
        ),
        optimizer=applied(moments, state.optimizer),
        loss_scale=next_loss_scale(state.loss_scale, finite=finite, config=precision),
        rng=state.rng,
    )
    if average is not None:
        towards = jax.tree.map(
            lambda a, b: (1.0 - average) * (b.astype(EXACT) - a.astype(EXACT)),
            state.average,
            new_state.parameters,
        )
        # Rounded by other numbers than the weights, whose errors would not average out.
        mean = _after_updates(state.average, towards, jax.random.fold_in(key, _ROUNDING))
        new_state = dataclasses.replace(new_state, average=applied(mean, state.average))
    return new_state, norm, statistics


def unscaled(gradients: Parameters, scale: Float[Array, ""], *, trained: Any = None) -> Parameters:
    """Divides gradients by the loss scale, in its dtype. Those of frozen parameters are 0, so XLA
    does not compute what they would have been.

    Args:
        trained: which parameters are not frozen, a tree of bools; None: all of them.
    """
    gradients = jax.tree.map(lambda g: g.astype(scale.dtype) / scale, gradients)
    if trained is None:
        return gradients
    return jax.tree.map(lambda g, on: g if on else jnp.zeros_like(g), gradients, trained)


def step_key(state: State) -> Key[Array, ""]:
    """Derives the random key of a state's next step, for dropout and stochastic rounding of
    weights.
    """
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def _after_updates(parameters: Parameters, steps: Any, key: jax.Array) -> Parameters:
    """Parameters with their updates, in the dtypes that they are kept in."""
    leaves, structure = jax.tree.flatten(parameters)
    each = structure.flatten_up_to(steps)
    if all(leaf.dtype == EXACT for leaf in leaves):
        return jax.tree.map(jnp.add, parameters, steps)
    keys = jax.random.split(jax.random.fold_in(key, _ROUNDING), len(leaves))
    return structure.unflatten(map(after_update, leaves, each, keys))


def pass_over(state: State) -> State:
    """Advances the state past a step whose batch is excluded: only the counters change."""
    return dataclasses.replace(state, step=state.step + 1, skipped=state.skipped + 1)


def step_record(metrics: StepMetrics | None) -> dict[str, Any]:
    """Formats a step's fetched metrics for ``metrics.jsonl``; None stands for a batch that is not
    trained on.

    ``statistics`` are left out, as they are written to ``statistics.jsonl``.
    """
    if metrics is None:
        return {"excluded": 1}
    record: dict[str, Any] = {
        "loss": float(metrics.loss),
        "gradient_norm": float(metrics.gradient_norm),
        "learning_rate": float(metrics.learning_rate),
        "loss_scale": float(metrics.loss_scale),
        "tokens": int(metrics.tokens) if math.isfinite(metrics.tokens) else None,
        "skipped": int(metrics.skipped),
        **_figures_record(metrics.figures),
        **_layer_record(metrics),
        **fp8_record(metrics.fp8),
    }
    if metrics.statistics:
        record["statistics"] = statistics_record(metrics.sums, metrics.statistics)
    return record


def _figures_record(figures: Mapping[str, Any]) -> dict[str, float]:
    return policy_record(figures) if "policy_tokens" in figures else pair_record(figures)


def _layer_record(metrics: StepMetrics) -> dict[str, float]:
    """Values that layers emit, by their own names, reduced over all layers.

    A loss is its share of the objective: a mean over tokens that are no padding, for multi-token
    prediction over counted targets. An array of counts gives the least, the
    most and the mean of its elements. It also gives the largest ratio of most to mean in a layer:
    how evenly tokens are spread.
    """
    record: dict[str, float] = {}
    for name, values in _by_name(metrics.sums, "losses").items():
        count = metrics.tokens if name == PREDICTION else metrics.tokens_read
        record[f"layers/{name}"] = float(sum(map(np.sum, values)) / max(count, 1.0))
    for name, values in _by_name(metrics.sums, "added").items():
        if all(value.ndim == 1 for value in values):  # a number of each layer
            record[f"layers/{name}"] = float(sum(map(np.sum, values)))
        else:
            record[f"layers/{name}/least"] = float(min(map(np.min, values)))
            record[f"layers/{name}/most"] = float(max(map(np.max, values)))
            record[f"layers/{name}/mean"] = float(np.mean([np.mean(value) for value in values]))
            record[f"layers/{name}/imbalance"] = float(max(map(_imbalance, values)))
    for name, values in _by_name(metrics.sums, "largest").items():
        record[f"layers/{name}"] = float(max(map(np.max, values)))
    return record


def _imbalance(counts: np.ndarray) -> float:
    """The largest count of a layer over the layer's mean, of the layer where that is largest."""
    means = np.mean(counts, axis=-1)
    return float(np.max(np.max(counts, axis=-1) / np.maximum(means, 1e-30)))


def _by_name(sums: tuple[Sums, ...], kind: str) -> dict[str, list[np.ndarray]]:
    """Values of all blocks that emit one of that name."""
    found: dict[str, list[np.ndarray]] = {}
    for block in sums:
        for name, value in getattr(block, kind).items():
            if name.startswith(STATISTICS):
                continue
            found.setdefault(name, []).append(np.asarray(value))
    return found
