"""Schedules against closed forms; the optimizer against AdamW written in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinfra import axes
from jaxinfra.config.optimizer import LearningRateSchedule, OptimizerConfig
from jaxinfra.model.definition import DimsLeaf, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.place import path_name
from jaxinfra.training.optim.learning_rate import learning_rate
from jaxinfra.training.optim.optimizer import make_optimizer
from tests.sharded import oracle
from tests.sharded.cases import gemma_like, gpt_like

STEPS = 40
EPSILON = float(np.finfo(np.float32).eps)


def closed_form(config: OptimizerConfig, step: int) -> float:
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    length = STEPS - config.warmup_steps
    done = min((step - config.warmup_steps) / length, 1.0)
    match config.schedule:
        case LearningRateSchedule.CONSTANT:
            return peak
        case LearningRateSchedule.LINEAR:
            return peak + (final - peak) * done
        case LearningRateSchedule.COSINE:
            return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
        case LearningRateSchedule.WSD:
            decay = config.decay_steps or STEPS // 5
            left = min(STEPS - step, decay)
            return final + (peak - final) * max(left, 0) / decay
    raise AssertionError(config.schedule)


@pytest.mark.parametrize("schedule", LearningRateSchedule)
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("decay_steps", [None, 3])
def test_schedule_is_its_closed_form(schedule, warmup, decay_steps):
    config = OptimizerConfig(
        learning_rate=0.3, schedule=schedule, warmup_steps=warmup, decay_steps=decay_steps
    )
    rate = learning_rate(config, steps=STEPS)
    # One traced call: a step's count is an int32 array, under strict promotion here.
    got = jax.vmap(lambda step: jnp.asarray(rate(step), jnp.float32))(jnp.arange(STEPS + 2))
    want = [closed_form(config, step) for step in range(STEPS + 2)]
    # A fraction of the run, its cosine and two products: four roundings of values up to the peak.
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * EPSILON * config.learning_rate)


def tree_of_dims():
    return {
        "weight": DimsLeaf((axes.LAYERS, axes.EMBED, axes.Q_HEADS, axes.HEAD)),
        "bias": DimsLeaf((axes.LAYERS, axes.Q_HEADS, axes.HEAD)),
    }


@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_optimizer_is_adamw(clip_norm):
    config = OptimizerConfig(
        learning_rate=0.05,
        warmup_steps=3,
        schedule=LearningRateSchedule.LINEAR,
        clip_norm=clip_norm,
    )
    optimizer = make_optimizer(config, dims=tree_of_dims(), steps=STEPS)
    rng = np.random.default_rng(0)
    shapes = {"weight": (2, 3, 4, 5), "bias": (2, 4, 5)}
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    steps = 5
    gradients = [
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(steps)
    ]

    @jax.jit
    def apply(parameters, state, gradient):
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters, state = start, jax.jit(optimizer.init)(start)
    for gradient in gradients:
        parameters, state = apply(parameters, state, gradient)
    exact = [
        oracle.clipped(jax.tree.map(np.float64, gradient), clip_norm)[0] for gradient in gradients
    ]
    rates = [closed_form(config, step) for step in range(steps)]
    for name, decay in (("weight", True), ("bias", False)):
        want = oracle.adamw(config, start[name], [g[name] for g in exact], rates, decay=decay)
        # Each step rounds the parameter once, and computes an update of at most about lr whose
        # bias corrections 1 - beta^t lose 1 / (1 - beta): a factor of 10 and 20 / 2.
        bound = steps * EPSILON * (np.abs(want).max() + 30 * config.learning_rate)
        assert np.abs(parameters[name] - want).max() <= bound


@pytest.mark.parametrize("make", [gpt_like, gemma_like])
def test_decay_is_on_matrices_only(make):
    model = define_model(make(), execution_on())
    config = OptimizerConfig(
        learning_rate=0.5, weight_decay=0.25, schedule=LearningRateSchedule.CONSTANT
    )
    optimizer = make_optimizer(config, dims=model.dims, steps=STEPS)
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), model.shapes)
    zeros = jax.tree.map(np.zeros_like, ones)

    @jax.jit
    def first_updates(gradients, parameters):
        return optimizer.update(gradients, optimizer.init(parameters), parameters)[0]

    updates = jax.device_get(first_updates(zeros, ones))
    decayed = set()
    for path, update in jax.tree_util.tree_flatten_with_path(updates)[0]:
        assert np.unique(update).tolist() in ([-0.125], [0.0])
        if update.any():
            decayed.add(path_name(path))
    matrices = ("attention/query", "attention/key", "attention/value", "attention/out")
    matrices += ("mlp/up", "mlp/down") + (("mlp/gate",) if make is gemma_like else ())
    expected = {f"blocks/{i}/{name}/weight" for i in range(len(make().blocks)) for name in matrices}
    expected.add("embedding/table")
    if make is gpt_like:
        expected |= {"unembedding/table", "positions/table"}
    assert decayed == expected
