"""Optimizers, schedules and frozen parameters of a user's own, and gradients out of ``Steps``."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinfra
from jaxinfra.axes import EMBED, MLP, VOCAB
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import DimsLeaf
from jaxinfra.training.optim.learning_rate import learning_rate
from jaxinfra.training.optim.optimizer import make_optimizer, trained_by

STEPS = 10
DIMS = {
    "embedding": {"table": DimsLeaf((VOCAB, EMBED))},
    "mlp": {"up": DimsLeaf((EMBED, MLP)), "bias": DimsLeaf((MLP,))},
}


@jaxinfra.part
def lion(rate):
    return optax.lion(rate, b1=0.8)


@jaxinfra.part
def falling(step, *, steps, peak):
    return peak * (1 - step / steps)


@jaxinfra.part
def doubled():
    return optax.scale(2.0)


@jaxinfra.part
def no_transformation(rate):
    return rate


@pytest.fixture(scope="module")
def small() -> jaxinfra.RunConfig:
    return jaxinfra.override(
        jaxinfra.preset("tiny"),
        [
            "model.vocab_size=32",
            "model.model_dim=16",
            "model.stacks.0.repeats=1",
            "model.stacks.0.pattern.0.feed_forward.hidden_dim=16",
            "training.batch_size=2",
            "training.steps=4",
        ],
    )


def parameters(seed: int) -> dict:
    drawn = np.random.default_rng(seed)
    shapes = {"embedding": {"table": (6, 4)}, "mlp": {"up": (4, 5), "bias": (5,)}}
    return jax.tree.map(
        lambda shape: drawn.normal(size=shape).astype(np.float32),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def updated(optimizer: optax.GradientTransformation, start: dict) -> dict:
    state = optimizer.init(start)
    for step in range(3):
        updates, state = optimizer.update(parameters(step), state, start)
        start = jax.tree.map(jnp.add, start, updates)
    return start


def own(run: jaxinfra.RunConfig, **parts) -> OptimizerConfig:
    return jaxinfra.customize(run, **parts).optimizer


def test_own_parts_compute_what_optax_does(small):
    config = own(small, optimizer=lion, schedule=falling, gradients=doubled)
    config = dataclasses.replace(config, learning_rate=0.1, clip_norm=0.5)
    ours = updated(make_optimizer(config, dims=DIMS, steps=STEPS), parameters(9))
    rate = optax.linear_schedule(0.1, 0.0, STEPS)
    plain = optax.chain(optax.scale(2.0), optax.clip_by_global_norm(0.5), optax.lion(rate, b1=0.8))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        ours,
        updated(plain, parameters(9)),
    )


@pytest.mark.parametrize("kind", ["adamw", "lion", "adafactor"])
def test_frozen_parameters_have_no_state_and_the_rest_learns_as_without_them(kind):
    config = OptimizerConfig(learning_rate=0.1, kind=kind, clip_norm=None, frozen=("embedding/*",))
    optimizer, start = make_optimizer(config, dims=DIMS, steps=STEPS), parameters(9)
    held = {"embedding": {"table": jnp.zeros((6, 4))}}
    state = optimizer.init(start)
    assert all(leaf.shape != (6, 4) for leaf in jax.tree.leaves(state))
    updates, _ = optimizer.update({**parameters(0), **held}, state, start)
    assert not np.any(updates["embedding"]["table"])
    alone, dims = {"mlp": start["mlp"]}, {"mlp": DIMS["mlp"]}
    other = make_optimizer(dataclasses.replace(config, frozen=()), dims=dims, steps=STEPS)
    expected, _ = other.update({"mlp": parameters(0)["mlp"]}, other.init(alone), alone)
    jax.tree.map(np.testing.assert_array_equal, updates["mlp"], expected["mlp"])


@pytest.mark.slow
def test_a_step_keeps_what_is_frozen_and_gradients_are_those_it_applies(small):
    steps = jaxinfra.Steps(jaxinfra.customize(small, frozen=("embedding/*",)))
    state = steps.initial_state()
    before = np.asarray(state.parameters["embedding"]["table"])
    batch = jaxinfra.batch_of(np.arange(34).reshape(2, 17) % 32)
    found = steps.gradients(state, batch)
    after, metrics = steps(state, batch)
    np.testing.assert_array_equal(after.parameters["embedding"]["table"], before)
    norm = optax.tree_utils.tree_norm(found.gradients)
    np.testing.assert_allclose(norm, metrics.gradient_norm, rtol=1e-5)
    assert float(found.loss) == float(metrics.loss)
    assert not np.any(found.gradients["embedding"]["table"])
    with pytest.raises(ConfigError, match="consumed by a step"):
        steps(state, batch)


def test_a_schedule_is_told_the_run(small):
    config = own(small, schedule=falling)
    assert float(learning_rate(config, steps=8)(2)) == pytest.approx(config.learning_rate * 0.75)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(function="a:b", beta1=0.5, weight_decay=0.0), "beta1=0.5 with function=a:b"),
        (dict(function="a:b"), "weight_decay=0.1 with function"),
        (dict(schedule_function="a:b", warmup_steps=3), "warmup_steps=3 with schedule_function"),
    ],
)
def test_a_setting_that_would_not_be_read_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(learning_rate=0.1, **change)


def test_what_is_no_optimizer_is_refused(small):
    with pytest.raises(ConfigError, match="GradientTransformation"):
        make_optimizer(own(small, optimizer=no_transformation), dims=DIMS, steps=STEPS)
    with pytest.raises(ConfigError, match="def or class"):
        jaxinfra.customize(small, optimizer=optax.adam(1e-3))


@pytest.mark.parametrize(
    ("patterns", "words"), [(("embed",), "did you mean 'embedding"), (("*",), "every parameter")]
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns, words):
    with pytest.raises(ConfigError, match=words):
        trained_by(OptimizerConfig(learning_rate=0.1, frozen=patterns), DIMS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: "tiny", "'tiny' is no RunConfig"),
        (lambda run: run.model, "is no RunConfig"),
        (lambda run: dataclasses.replace(run, mesh="fsdp=4"), "mesh='fsdp=4' is no MeshConfig"),
    ],
)
def test_what_is_no_config_is_refused(small, change, words):
    with pytest.raises(ConfigError, match=words):
        jaxinfra.Steps(change(small))
