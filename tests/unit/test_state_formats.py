"""Formats of weights and moments between steps: unbiased rounding, bytes, updates beside fp32's."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinfra.axes import EMBED, EXPERTS, LAYERS, MLP
from jaxinfra.config.data import DataConfig
from jaxinfra.config.optimizer import MomentFormat, MuonConfig, OptimizerConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig, StoredWeights
from jaxinfra.config.run import RunConfig, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import DimsLeaf
from jaxinfra.numerics.storage import (
    after_update,
    read_moment,
    stochastically_rounded,
    stored_moment,
)
from jaxinfra.training.job import make_job
from jaxinfra.training.optim.optimizer import scale_by_stored_adam
from tests.sharded.cases import llama_like

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.float8_e4m3fn}
SHORT = {
    # first and second moment, and bytes of both.
    "bf16": (MomentFormat.BF16, MomentFormat.BF16, 4),  # DeepSeek-V3
    "fp8-lm": (MomentFormat.FP8, MomentFormat.FP16, 3),
    "fp8": (MomentFormat.FP8, MomentFormat.FP8, 2),
}


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_to_a_neighbour_and_right_on_average(name):
    """Normal and subnormal numbers; the mean of n draws is within 5 sigma, sigma half a unit."""
    dtype, n = DTYPES[name], 4096
    info = jnp.finfo(dtype)
    least = max(float(info.smallest_normal), 1e-30)
    values = np.asarray([1.03, -0.37, 3.3 * least, 0.3 * least, 0.0, float(info.max)], np.float32)
    keys = jax.random.split(jax.random.key(0), n)
    draw = jax.jit(jax.vmap(lambda key: stochastically_rounded(jnp.asarray(values), key, dtype)))
    drawn = np.asarray(draw(keys), np.float64)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(values), least)))) * 2.0**-info.nmant
    assert np.all(np.abs(drawn - values) < unit)
    for column in drawn.T:
        assert len(np.unique(column)) <= 2
    assert np.all(np.abs(drawn.mean(axis=0) - values) <= 5 * 0.5 * unit / math.sqrt(n))


def test_weights_without_a_master_learn_from_steps_below_their_last_place():
    weight = jnp.ones(4096, jnp.bfloat16)
    step = jnp.full(4096, -1e-4, jnp.float32)

    def one(weight, key):
        return after_update(weight, step, key), None

    keys = jax.random.split(jax.random.key(0), 100)
    learned = jax.jit(lambda weight: jax.lax.scan(one, weight, keys)[0])(weight)
    # 100 steps of variance (unit x step) each; rounded to the nearest nothing would have moved.
    error = float(jnp.mean(learned.astype(jnp.float32))) - 0.99
    assert abs(error) < 5 * math.sqrt(100 * 2.0**-8 * 1e-4 / 4096)
    assert bool(jnp.all((weight.astype(jnp.float32) + step).astype(jnp.bfloat16) == weight))


@pytest.mark.slow_cases("fp8-lm", "bf16")
@pytest.mark.parametrize("name", SHORT)
def test_short_moments_follow_adam(name):
    """Of a gradient with a mean, the direction is Adam's but for what is rounded away at each step:
    half a unit in the last place in root mean square at most, of which the share beta is in the
    next step's moment. A second moment kept as it is counts by half, under its root.
    """
    first, second, size = SHORT[name]
    config = OptimizerConfig(learning_rate=1.0, first_moment=first, second_moment=second)
    exact = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    short = scale_by_stored_adam(config, {"w": DimsLeaf((EMBED, MLP))})
    params = {"w": jnp.zeros((64, 64))}
    drift = jax.random.normal(jax.random.key(1), (64, 64))

    def steps(update, state):
        def one(state, key):
            gradient = {"w": drift + 0.1 * jax.random.normal(key, (64, 64))}
            out, state = update(gradient, state)
            return state, out["w"]

        return jax.lax.scan(one, state, jax.random.split(jax.random.key(2), 30))

    with jax.numpy_dtype_promotion("standard"):
        _, want = jax.jit(lambda: steps(exact.update, exact.init(params)))()
        state, got = jax.jit(lambda: steps(short.update, short.init(params)))()
    assert state.mu["w"].nbytes + state.nu["w"].nbytes == size * 64 * 64
    off = jnp.sqrt(jnp.mean((got[-1] - want[-1]) ** 2)) / jnp.sqrt(jnp.mean(want[-1] ** 2))
    halves = [2.0 ** -(jnp.finfo(DTYPES[each.value]).nmant + 1) for each in (first, second)]
    of_first = halves[0] / math.sqrt(1 - config.beta1**2)
    of_second = halves[1] / math.sqrt(1 - config.beta2**2) * (0.5 if name == "bf16" else 1.0)
    assert float(off) < math.hypot(of_first, of_second)
    assert float(off) > 0.01 * math.hypot(of_first, of_second)  # it was rounded


def test_a_moments_scale_reaches_its_largest_element():
    stored = jax.jit(stored_moment, static_argnums=1, static_argnames="axes")
    read = jax.jit(read_moment)
    for moment in np.float32([[3e-9, -1e-9, 0.0], [0.0, 0.0, 0.0]]):
        values, scale = stored(moment, MomentFormat.FP8, jax.random.key(0), axes=(0,))
        np.testing.assert_allclose(read(values, scale), moment, rtol=2.0**-3)


def test_a_layers_moments_are_those_of_the_layer_alone():
    """Gradients of layers and experts differ in size by 10^9, more than a format's range."""
    fp16 = MomentFormat.FP16  # rounds to nearest, so that nothing is random
    config = OptimizerConfig(learning_rate=1.0, first_moment=fp16, second_moment=fp16)
    sizes = np.float32([[1.0, 1e-3], [1e-6, 1e-9]])[..., None, None]
    gradients = sizes * np.random.default_rng(0).normal(size=(3, 2, 2, 8, 4)).astype(np.float32)

    def run(gradients, dims):
        update = scale_by_stored_adam(config, {"w": DimsLeaf(dims)})
        state = update.init({"w": jnp.zeros(gradients.shape[1:])})
        for gradient in gradients:
            step, state = update.update({"w": jnp.asarray(gradient)}, state)
        return np.asarray(step["w"])

    with jax.numpy_dtype_promotion("standard"):
        stacked = run(gradients, (LAYERS, EXPERTS, EMBED, MLP))
        for layer, expert in np.ndindex(2, 2):
            alone = run(gradients[:, layer, expert], (EMBED, MLP))
            # float32's last bits depend on vectors' lengths; one rounding to FP16 may be another.
            np.testing.assert_allclose(stacked[layer, expert], alone, rtol=2.0**-10)


def run_of(weights: StoredWeights, first: MomentFormat, second: MomentFormat) -> RunConfig:
    return RunConfig(
        model=llama_like(),
        data=DataConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-3, first_moment=first, second_moment=second),
        training=TrainingConfig(steps=1, batch_size=2, sequence_length=8),
        precision=PrecisionConfig(policy=PolicyName.BF16, weights=weights),
    )


FP32, BF16 = StoredWeights.FP32, StoredWeights.BF16
BYTES = {  # of a parameter: weights (and masters, which they are), gradient, moments
    "fp32": (FP32, MomentFormat.FP32, MomentFormat.FP32, (4, 4, 8)),
    "bf16 moments": (FP32, MomentFormat.BF16, MomentFormat.BF16, (4, 4, 4)),
    "fp8-lm moments": (FP32, MomentFormat.FP8, MomentFormat.FP16, (4, 4, 3)),
    "no master": (BF16, MomentFormat.FP32, MomentFormat.FP32, (2, 2, 8)),
    "no master, fp8 moments": (BF16, MomentFormat.FP8, MomentFormat.FP8, (2, 2, 2)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each == "no master, fp8 moments" else pytest.mark.slow)
        for each in BYTES
    ],
)
def test_bytes_of_a_parameter(name):
    """Of the state that a job keeps and of the gradients that it makes; scales and counters of some
    bytes an array apart.
    """
    *formats, sizes = BYTES[name]
    job = make_job(run_of(*formats), devices=jax.devices()[:1])
    state = job.abstract_state()
    rows: Any = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    weights: Any = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    batch = Batch(tokens=rows, targets=rows, segment_ids=rows, positions=rows, weights=weights)
    learned = jax.eval_shape(
        lambda parameters, batch: job.gradient(
            parameters, {}, batch, key=jax.random.key(0), loss_scale=jnp.float32(1.0)
        ),
        state.parameters,
        batch,
    )
    num = job.model.num_parameters

    def bytes_of(tree) -> float:
        return (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.ndim)
            / num
        )

    found = [bytes_of(each) for each in (state.parameters, learned.gradients, state.optimizer)]
    assert found == pytest.approx(sizes, abs=0.02)  # a scale for each layer's matrix is no byte


def test_what_cannot_be_kept_short_is_refused():
    with pytest.raises(ConfigError, match="only AdamW keeps moments in other formats"):
        OptimizerConfig(learning_rate=1.0, first_moment=MomentFormat.BF16, muon=MuonConfig())
    with pytest.raises(ConfigError, match="choose policy=bf16"):
        PrecisionConfig(policy=PolicyName.FP32, weights=StoredWeights.BF16)
