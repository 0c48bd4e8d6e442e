"""Each layer against NumPy in float64, or a property of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra import axes
from jaxinfra.config.kinds import MlpKind, NormKind
from jaxinfra.config.model import MlpConfig, NormConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.dropout import dropout
from jaxinfra.model.embedding import Embedding
from jaxinfra.model.mlp import Mlp
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Pass
from jaxinfra.model.repetition import stacked_layers
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from tests.sharded import oracle

EPSILON = float(np.finfo(np.float32).eps)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize(
    "config",
    [
        NormConfig(),
        NormConfig(scale_offset=1.0, epsilon=1e-2),
        NormConfig(kind=NormKind.LAYER, bias=True),
        NormConfig(kind=NormKind.LAYER),
    ],
    ids=["rms", "rms-offset", "layer-bias", "layer"],
)
def test_norm(config, policy):
    width = 48
    execution = execution_on(policy=POLICIES[policy])
    norm = Norm(config, shape=(width,), dims=(axes.EMBED,), execution=execution)
    norm.scale[...] = norm.scale[...] + draw(width, seed=1)
    if norm.bias is not None:
        norm.bias[...] = draw(width, seed=2)
    # A mean far from 0 would cancel if variance were computed as E[x^2] - E[x]^2.
    x = jnp.asarray(30.0 + np.asarray(draw(5, 7, width)), execution.policy.compute)
    got = np.asarray(norm(x))
    assert got.dtype == execution.policy.compute

    x64 = np.asarray(x, float)
    if config.kind is NormKind.LAYER:
        x64 = x64 - x64.mean(axis=-1, keepdims=True)
    y = x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + config.epsilon)
    want = y * (np.asarray(norm.scale[...], float) + config.scale_offset)
    if norm.bias is not None:
        want = want + np.asarray(norm.bias[...], float)
    # fp32 inside: x - mean loses eps of the mean (30) and sums run over the width; then one
    # rounding to the compute dtype.
    error = EPSILON * (30 + width) + float(jnp.finfo(got.dtype).eps)
    assert np.max(np.abs(got.astype(float) - want)) <= error * np.max(np.abs(want))


SPELLED = {
    MlpKind.SWIGLU: lambda x: x / (1 + np.exp(-x)),
    MlpKind.GEGLU: oracle.gelu,
    MlpKind.GEGLU_TANH: lambda x: (
        0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    MlpKind.SWIGLU_CLAMPED: lambda x: np.minimum(x, 7) / (1 + np.exp(-1.702 * np.minimum(x, 7))),
    MlpKind.GELU: oracle.gelu,
    MlpKind.GELU_TANH: lambda x: (
        0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    MlpKind.RELU: lambda x: np.maximum(x, 0),
    MlpKind.RELU_SQUARED: lambda x: np.maximum(x, 0) ** 2,
    # Its two learned numbers are 0 at first, and softplus(0) = ln 2.
    MlpKind.XIELU: lambda x: (
        0.5 * x + np.where(x > 0, np.log(2) * x**2, (np.log(2) + 0.5) * (np.expm1(x) - x))
    ),
}


@pytest.mark.parametrize("kind", MlpKind)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(kind, bias):
    config = MlpConfig(hidden_dim=20, kind=kind, bias=bias)
    mlp = Mlp(
        config,
        model_dim=12,
        std=0.7,
        out_std=0.7,
        execution=execution_on(),
        rngs=nnx.Rngs(params=0),
    )

    def apply(projection, x):
        y = x @ np.asarray(projection.weight[...], float)
        return y if projection.bias is None else y + np.asarray(projection.bias[...], float)

    for number, projection in enumerate((mlp.gate, mlp.up, mlp.down)):
        if projection is not None and projection.bias is not None:
            projection.bias[...] = draw(*projection.bias[...].shape, seed=number)
    x = draw(2, 5, 12)
    up = apply(mlp.up, np.asarray(x, float))
    if mlp.gate is None:
        want = apply(mlp.down, SPELLED[kind](up))
    else:
        gate = apply(mlp.gate, np.asarray(x, float))
        if kind is MlpKind.SWIGLU_CLAMPED:
            up = np.clip(up, -7.0, 7.0) + 1.0
        want = apply(mlp.down, SPELLED[kind](gate) * up)
    nothing_else = Pass(positions_BT=jnp.asarray(np.zeros(x.shape[:2], np.int32)))
    # Two sums of products, 12 and 20 long, and an activation.
    got = np.asarray(mlp(x, nothing_else).x)
    assert np.max(np.abs(got - want)) <= EPSILON * (12 + 20 + 8) * np.max(np.abs(want))


def embedding(**options) -> Embedding:
    return Embedding(
        num_rows=7,
        rows_dim=axes.VOCAB,
        matmul=False,
        model_dim=4,
        std=1.0,
        execution=execution_on(**options),
        rngs=nnx.Rngs(params=0),
    )


def test_an_id_outside_the_table_yields_nan():
    layer = embedding()
    rows = np.asarray(jax.jit(lambda ids: layer(ids))(np.array([[0, 6, 7, -8]])))
    np.testing.assert_array_equal(rows[0, :2], np.asarray(layer.table[...])[[0, 6]])
    assert np.isnan(rows[0, 2:]).all()


def test_gradient_of_a_repeated_token_is_summed_in_fp32():
    """In bf16 a sum of ones stops growing at 256."""
    layer = embedding(policy=POLICIES[PolicyName.BF16])
    graphdef, state = nnx.split(layer)
    ids = jnp.zeros((1, 1000), jnp.int32)

    def total(state):
        return jnp.sum(nnx.merge(graphdef, state)(ids).astype(jnp.float32))

    gradient = np.asarray(jax.jit(jax.grad(total))(state)["table"][...])
    np.testing.assert_array_equal(gradient[0], 1000.0)


ANYWHERE = execution_on().place


def test_dropout_keeps_the_mean():
    rate, x = 0.3, jnp.ones((200, 200))
    dropped = np.asarray(dropout(x, rate=rate, key=jax.random.key(0), place=ANYWHERE))
    kept = np.mean(dropped != 0)
    # Five standard deviations of a binomial fraction.
    assert kept == pytest.approx(1 - rate, abs=5 * np.sqrt(rate * (1 - rate) / x.size))
    np.testing.assert_array_equal(np.unique(dropped), np.float32([0.0, 1.0 / (1.0 - rate)]))
    np.testing.assert_array_equal(
        dropout(x, rate=rate, key=jax.random.key(0), place=ANYWHERE), dropped
    )
    other = np.asarray(dropout(x, rate=rate, key=jax.random.key(1), place=ANYWHERE))
    assert (other != dropped).any()
    assert dropout(x, rate=rate, key=None, place=ANYWHERE) is x
    assert dropout(x, rate=0.0, key=jax.random.key(0), place=ANYWHERE) is x


def test_stacked_layers_are_drawn_independently():
    config = MlpConfig(hidden_dim=40)

    def make(rngs):
        return Mlp(config, model_dim=50, std=0.5, out_std=0.25, execution=execution_on(), rngs=rngs)

    stacked = stacked_layers(make, num_layers=3, rngs=nnx.Rngs(params=0))
    up, down = stacked.up.weight, stacked.down.weight
    assert up.axes == (axes.LAYERS, axes.EMBED, axes.MLP)
    for weight, std in ((np.asarray(up[...]), 0.5), (np.asarray(down[...]), 0.25)):
        for layer in range(3):
            # The deviation of n values' deviation is std / sqrt(2 n): five of them.
            within = 5 / np.sqrt(2 * weight[layer].size)
            assert np.std(weight[layer]) == pytest.approx(std, rel=within)
        correlation = np.corrcoef(np.reshape(weight, (3, -1)))
        assert np.max(np.abs(correlation - np.eye(3))) < 5 / np.sqrt(weight[0].size)
