"""The training step: accumulation, memory, donation, skipped steps, loss scaling, metrics."""

import dataclasses
import functools
import math
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinfra.config.precision import LossScaling, PolicyName, PrecisionConfig
from jaxinfra.data.batch import batch_of
from jaxinfra.model.gradients import Gradients
from jaxinfra.training import gradients
from jaxinfra.training.gradients import (
    batch_loss,
    count_targets,
    count_tokens,
    make_evaluation_step,
    split_batch,
)
from jaxinfra.training.state import state_around
from jaxinfra.training.step import make_train_step
from tests.sharded import oracle
from tests.sharded.cases import (
    COMPILER_OPTIONS,
    OPTIMIZER,
    build,
    gradients_of,
    llama_like,
    packed_batch,
)
from tests.tolerance import assert_within_rounding

CONFIG = llama_like()
Z_LOSS = 0.01
FP16 = PrecisionConfig(
    policy=PolicyName.FP16,
    loss_scaling=LossScaling.DYNAMIC,
    initial_loss_scale=64.0,
    growth_interval=3,
)


@functools.cache
def stepped(accumulation: int):
    """A step in fp32, jitted once for all tests."""
    return build(CONFIG, z_loss=Z_LOSS, accumulation=accumulation)


@functools.cache
def fp16_step():
    return build(CONFIG, precision=FP16)


@functools.cache
def samples():
    parameters = jax.device_get(stepped(1).state().parameters)
    return oracle.samples(CONFIG, parameters, packed_batch(), z_loss=Z_LOSS)


def exact():
    return samples()[0]


def overflowing(batch):
    """A batch whose loss and gradient are not finite."""
    return dataclasses.replace(batch, weights=batch.weights.at[2, 1].set(jnp.inf))


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("accumulation", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_micro_batches_equal_the_batch(accumulation):
    """Though their counted targets differ: documents and padding are ragged."""
    batch = packed_batch()
    counts = np.sum(split_batch(batch, accumulation).weights, axis=(1, 2))
    assert len(set(counts.tolist())) > 1
    want = oracle.rounded(
        [(loss, *oracle.clipped(grads, OPTIMIZER.clip_norm)) for loss, grads in samples()]
    )
    for parts in (1, accumulation):
        built = stepped(parts)
        state, metrics = built.step(built.state(), batch)
        moments = jax.tree.map(lambda m: m / (1 - OPTIMIZER.beta1), gradients_of(state))
        got = jax.device_get((metrics.loss, moments, metrics.gradient_norm))
        assert_within_rounding(got, want, what=f"{parts} micro-batches")


def test_split_batch_deals_rows():
    batch = packed_batch(rows=6)
    parts = split_batch(batch, 3)
    for k in range(3):
        chex.assert_trees_all_equal(
            jax.tree.map(lambda x, k=k: x[k], parts), jax.tree.map(lambda x, k=k: x[k::3], batch)
        )


@pytest.mark.slow
def test_memory_does_not_grow_with_micro_batches():
    """Equal micro-batches of 4 rows: beyond the batch itself, 8 need no more than 2."""

    def temporaries(accumulation):
        rows = 4 * accumulation
        built = build(CONFIG, accumulation=accumulation, batch_size=rows)
        batch = packed_batch(rows=rows)
        lowered = built.step.lower(built.shapes, batch)
        size = lowered.compile().memory_analysis().temp_size_in_bytes
        return size, sum(leaf.nbytes for leaf in jax.tree.leaves(batch))

    (few, few_bytes), (many, many_bytes) = temporaries(2), temporaries(8)
    # Dealing rows to micro-batches copies the batch: integers, not activations.
    assert many - few <= many_bytes - few_bytes
    assert few > 4 * many_bytes, "too small a model to show growth"


@pytest.mark.slow
def test_donated_state_is_updated_in_place():
    built = stepped(1)
    state, batch = built.state(), packed_batch()
    compiled = built.step.lower(state, batch).compile()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # The key passes through unchanged; everything else is written where it was.
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes
    # The first state lies in NumPy's memory, which is never reused.
    state, _ = built.step(state, batch)
    where = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), state.parameters)
    after, _ = built.step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.parameters))
    chex.assert_trees_all_equal(
        where, jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), after.parameters)
    )


def test_micro_batches_are_traced_once(monkeypatch):
    """The loop's sums get their shapes from the trace that becomes its body."""
    traces = []

    def traced(*args, **options):
        traces.append(args)
        return batch_loss(*args, **options)

    monkeypatch.setattr(gradients, "batch_loss", traced)
    built = build(CONFIG, accumulation=2)
    built.step.trace(built.shapes, packed_batch())
    assert len(traces) == 1


@pytest.mark.slow_cases("<lambda>1")
@pytest.mark.parametrize("make", [lambda: stepped(1), lambda: stepped(2), fp16_step])
def test_non_finite_step_changes_counters_only(make):
    built = make()
    before = jax.device_get(built.state())
    state, metrics = built.step(built.state(), overflowing(packed_batch()))
    state = jax.device_get(state)
    chex.assert_trees_all_equal(state.parameters, before.parameters)
    chex.assert_trees_all_equal(state.optimizer, before.optimizer)
    chex.assert_trees_all_equal(state.rng, before.rng)
    assert (state.step, state.skipped, state.skipped_in_a_row) == (1, 1, 1)
    assert (metrics.skipped, metrics.skipped_in_a_row) == (1, 1)
    halved = built.precision.loss_scaling is LossScaling.DYNAMIC
    assert state.loss_scale.value == before.loss_scale.value * (0.5 if halved else 1.0)


def test_skipped_steps_are_counted_and_leave_no_trace():
    built, good = stepped(1), packed_batch()
    bad = overflowing(good)
    state = built.state()
    counts = []
    for batch in (good, bad, bad, good):
        state, metrics = built.step(state, batch)
        counts.append((int(state.step), int(metrics.skipped), int(metrics.skipped_in_a_row)))
    assert counts == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 0)]
    never = built.state()
    for batch in (good, good):
        never, never_metrics = built.step(never, batch)
    chex.assert_trees_all_equal(state.parameters, never.parameters)
    chex.assert_trees_all_equal(state.optimizer, never.optimizer)
    assert metrics.learning_rate == never_metrics.learning_rate


def test_dynamic_loss_scale_halves_and_doubles():
    built, good = fp16_step(), packed_batch()
    bad = overflowing(good)
    state = built.state()
    used = []
    for batch in (good, good, good, good, bad, good, good, bad, good, good, good, good):
        state, metrics = built.step(state, batch)
        used.append(float(metrics.loss_scale))
    # Doubled after three finite steps in a row, halved at once; two finite steps count for nothing.
    assert used == [64, 64, 64, 128, 128, 64, 64, 64, 32, 32, 32, 64]


def test_a_mean_of_bf16_weights_follows_them():
    """A step towards them is less than half a unit in the last place: rounded to nearest, the mean
    would stay where it began."""
    decay, steps, ulp = 0.999, 100, 2.0**-7
    weights = jnp.full((4096,), 1.5, jnp.bfloat16)

    class Still:
        """A model that no rule changes, with a gradient of 0."""

        model = types.SimpleNamespace(next_state=lambda state, sums, cotangents: state)

        def __call__(self, parameters, state, batch, *, key, loss_scale):
            zeros = jax.tree.map(jnp.zeros_like, parameters)
            return Gradients(loss=jnp.float32(0.0), gradients=zeros, sums=(), state={})

        def counted(self, batch):
            return jnp.sum(batch.weights)

    optimizer, precision = optax.identity(), PrecisionConfig(policy=PolicyName.BF16)
    gradient: Any = Still()
    step = make_train_step(
        gradient, optimizer, learning_rate=lambda _: 0.0, precision=precision, average=decay
    )
    state = state_around({"w": weights}, {}, optimizer, precision=precision, seed=0)
    state = dataclasses.replace(state, average={"w": jnp.ones_like(weights)})
    batch = packed_batch()
    state = jax.jit(
        lambda state: jax.lax.fori_loop(0, steps, lambda _, now: step(now, batch)[0], state)
    )(state)
    assert state.average["w"].dtype == jnp.bfloat16
    want = 1.5 - 0.5 * decay**steps
    # Each rounding errs by at most a unit, with a deviation of at most half of one.
    deviation = math.sqrt(steps / weights.size) * ulp / 2
    assert abs(float(jnp.mean(state.average["w"], dtype=jnp.float32)) - want) < 5 * deviation
    assert want - 1.0 > 10 * deviation


@pytest.mark.slow  # why fp16 asks for a scale; its steps are tested here
def test_fp16_loses_small_gradients_without_loss_scaling():
    """Small weights make query gradients of about 1e-8, under fp16's smallest number 6e-8."""
    config = dataclasses.replace(CONFIG, init_std=0.002)
    batch = packed_batch()
    precision = PrecisionConfig(
        policy=PolicyName.FP16, loss_scaling=LossScaling.STATIC, initial_loss_scale=2.0**15
    )
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=None)
    built = build(config, precision=precision, optimizer_config=optimizer)
    parameters = jax.device_get(built.state().parameters)
    _, gradients = oracle.loss_and_gradients(config, parameters, batch, z_loss=0.0)

    def query(tree):
        return np.asarray(tree["blocks"][0]["attention"]["query"]["weight"], np.float64)

    errors = {}
    for scale in (1.0, 2.0**15):
        before = built.state()
        assert before.loss_scale.value == 2.0**15
        loss_scale = dataclasses.replace(
            before.loss_scale, value=jnp.full_like(before.loss_scale.value, scale)
        )
        state, metrics = built.step(dataclasses.replace(before, loss_scale=loss_scale), batch)
        assert metrics.skipped == 0
        got = query(gradients_of(state)) / (1 - OPTIMIZER.beta1)
        errors[scale] = np.linalg.norm(got - query(gradients)) / np.linalg.norm(query(gradients))
    # Scaled: rounding of fp16, half of 2^-10, through some tens of operations.
    assert errors[2.0**15] < 20 * 2.0**-11
    assert errors[1.0] > 0.1


def test_metrics():
    built, batch = stepped(1), packed_batch()
    _, metrics = built.step(built.state(), batch)
    loss, gradients = exact()
    assert metrics.tokens == np.sum(batch.weights)
    assert metrics.learning_rate == np.float32(OPTIMIZER.learning_rate / OPTIMIZER.warmup_steps)
    assert metrics.loss_scale == 1.0
    # The loss is without z-loss, the norm before clipping. fp32 sums of about a hundred terms.
    assert metrics.loss == pytest.approx(float(loss), rel=1e-6)
    assert metrics.gradient_norm == pytest.approx(oracle.clipped(gradients, None)[1], rel=1e-5)
    assert metrics.gradient_norm > OPTIMIZER.clip_norm


@pytest.mark.slow  # runs with dropout resume to the bit in `test_training_interrupted.py`
def test_dropout_follows_step_and_seed_only():
    built = build(dataclasses.replace(CONFIG, dropout_rate=0.3))
    batch = packed_batch()

    def loss(step: int):
        state = built.state()
        state = dataclasses.replace(state, step=jnp.int32(step))
        return float(built.step(state, batch)[1].loss)

    assert loss(0) == loss(0)
    assert len({loss(step) for step in range(3)}) == 3


def test_evaluation_sums_what_training_averages():
    config = dataclasses.replace(CONFIG, dropout_rate=0.3)
    built = build(config)
    parameters, batch = built.state().parameters, packed_batch()
    evaluate = jax.jit(make_evaluation_step(built.model), compiler_options=COMPILER_OPTIONS)
    nll, count = evaluate(parameters, batch)
    loss, _ = oracle.loss_and_gradients(config, jax.device_get(parameters), batch, z_loss=0.0)
    assert count == np.sum(batch.weights)
    assert nll / count == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_batch_without_counted_tokens_changes_nothing(accumulation):
    batch = dataclasses.replace(packed_batch(), weights=jnp.zeros_like(packed_batch().weights))
    built = stepped(accumulation)
    before = jax.device_get(built.state())
    state, metrics = built.step(built.state(), batch)
    assert np.isnan(float(metrics.loss))  # the mean of nothing is not 0
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row), int(metrics.tokens)) == (1, 0, 0)
    chex.assert_trees_all_equal(state.parameters, before.parameters)
    chex.assert_trees_all_equal(state.optimizer, before.optimizer)
    assert int(state.step) == 1


def test_counts_of_a_batch_are_its_weights_and_its_tokens():
    """Weights may sum to less than 1. Padding is what has no segment, whatever counts."""
    batch = batch_of([[1, 2, 3, 4]], weights=[[0.25, 0.0, 0.25]])
    assert float(count_targets(batch)) == 0.5
    assert float(count_tokens(batch)) == 3.0
    padded = dataclasses.replace(batch, segment_ids=np.array([[0, 0, -1]], np.int32))
    assert float(count_tokens(padded)) == 2.0
    none = dataclasses.replace(padded, weights=np.zeros((1, 3), np.float32))
    assert float(count_targets(none)) == 1.0
