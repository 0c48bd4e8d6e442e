"""Experts in 8 bits: products and gradients against NumPy, which quantizes itself; faults."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.precision import Fp8Matmuls, PolicyName, PrecisionConfig, Site
from jaxinfra.config.presets.mixtures import tiny_moe
from jaxinfra.model.definition import define_model, merged
from jaxinfra.numerics.policy import policy_of
from jaxinfra.ops import experts as fp8_experts
from jaxinfra.ops.activation import activated
from jaxinfra.ops.experts import (
    ExpertWeights,
    apply_experts,
    multiply_groups_fp8,
    sorted_copies,
)
from jaxinfra.ops.fp8 import multiply_fp8
from jaxinfra.parallel.execution import execution_on
from pallas_kernels.common.scales import Quantized
from tests.kernels import grouped_oracle
from tests.rounding import stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding
from tests.unit.test_fp8 import rounded_to

CONFIG = Fp8Matmuls(sites=(Site.PROJECTION, Site.EXPERTS))
RECIPE = policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=CONFIG)).recipe(Site.EXPERTS)
NUM_TOKENS, TOP_K, E, D, F = 40, 2, 4, 200, 72
LEFT_OUT = 5
"""Choices without a copy."""


@functools.cache
def copies():
    """The second expert has no token, and a few choices found no room."""
    rng = np.random.default_rng(seeded(0))
    expert_NK = rng.choice([0, 2, 3], size=(NUM_TOKENS, TOP_K)).astype(np.int32)
    room = NUM_TOKENS * TOP_K - LEFT_OUT
    return jax.device_get(sorted_copies(jnp.asarray(expert_NK), num_experts=E, room=room))


def rows():
    return np.minimum(copies().choice_M // TOP_K, NUM_TOKENS - 1)


@functools.cache
def arrays():
    """x, gate, up and the cotangents of both products."""
    rng = np.random.default_rng(seeded(1))
    x = rng.normal(size=(NUM_TOKENS, D)) * 10.0 ** rng.uniform(-2, 2, (NUM_TOKENS, 1))
    weights = rng.normal(size=(2, E, D, F)) * 10.0 ** rng.uniform(-2, 1, (1, E, 1, 1))
    g = rng.normal(size=(2, len(copies().choice_M), F)) * 1e-3
    return tuple(each.astype(ml_dtypes.bfloat16) for each in (x, *weights, *g))


def run(x, weights, cotangents, copies, rows_M):
    f = functools.partial(multiply_groups_fp8, recipe=RECIPE)
    y, pull = jax.vjp(lambda x, weights: f(x, weights, copies, rows_M), x, weights)
    return y, pull(jnp.concatenate(cotangents, axis=1))


program = jax.jit(run)


def computed(program, sizes_E):
    """Both products side by side, dx, and the gradients of both weights."""
    x, *rest = arrays()
    weights = tuple(w.astype(np.float32) for w in rest[:2])
    y, (dx, dws) = program(
        x, weights, tuple(rest[2:]), dataclasses.replace(copies(), sizes_E=sizes_E), rows()
    )
    return jax.tree.map(np.asarray, (y, dx, *dws))


@functools.cache
def expected():
    x, gate, up, g_gate, g_up = arrays()
    sizes, rows_M = copies().sizes_E, rows()
    to = functools.partial(rounded_to, config=CONFIG, kind=CONFIG.forward)
    rows_MD = to(x, size=(1, 128))[rows_M]
    both = np.concatenate([gate, up], axis=-1)
    w = [to(each, size=(128, 128)) for each in both]
    g = to(np.concatenate([g_gate, g_up], axis=1), size=(1, 128))

    def product(a, columns, of_group):
        return grouped_oracle.by_groups(
            sizes, len(rows_M), columns, lambda i, at: np.matmul(a[at], of_group(w[i]))
        )

    y = product(rows_MD, 2 * F, lambda w: w)
    d_rows = stored(product(g, D, lambda w: w.T), jnp.bfloat16)
    dx = grouped_oracle.scattered(d_rows, rows_M, sizes, NUM_TOKENS)
    copied = x.astype(np.float64)[rows_M]
    dws = [
        grouped_oracle.weight_gradient(copied, d.astype(np.float64), sizes) for d in (g_gate, g_up)
    ]
    return y, dx, *dws


def test_products_and_gradients_are_those_of_rounded_operands():
    got = computed(program, copies().sizes_E)
    assert [each.dtype for each in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 2
    assert_within_rounding(got, expected())


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: jnp.roll(scale, 1, axis=2),
        pytest.param(jnp.ones_like, marks=pytest.mark.slow),  # one more program
    ],
    ids=["another block's scale", "unscaled"],
)
def test_wrong_scales_are_caught(change, monkeypatch):
    right = fp8_experts.quantized_weights

    def wrong(weights, recipe):
        values, scale = right(weights, recipe)
        return Quantized(values, change(scale))

    monkeypatch.setattr(fp8_experts, "quantized_weights", wrong)
    got = computed(jax.jit(lambda *each: run(*each)), copies().sizes_E)
    assert_caught(got[:2], expected()[:2])


def test_a_boundary_that_is_one_off_is_caught():
    got = computed(program, copies().sizes_E + np.int32([1, 0, -1, 0]))
    assert_caught(got, expected())


def assert_caught(got, want):
    for mine, true in zip(got, want, strict=True):
        with pytest.raises(AssertionError, match="spread"):
            assert_within_rounding(mine, true)


@pytest.mark.slow  # products and gradients are held to NumPy above
def test_experts_are_dense_layers_on_their_tokens():
    """By the same recipe. Where a sum rounds otherwise, an operand may be another 8-bit number."""
    rng = np.random.default_rng(seeded(2))
    width, hidden = 128, 128
    x = jnp.asarray(rng.normal(size=(NUM_TOKENS, width)), jnp.bfloat16)
    gate, up, down = (
        jnp.asarray(rng.normal(size=(2, *shape)) / 8, jnp.float32)
        for shape in ((width, hidden), (width, hidden), (hidden, width))
    )
    expert_N1 = jnp.arange(NUM_TOKENS, dtype=jnp.int32)[:, None] % 2

    @jax.jit
    def run(x):
        experts = ExpertWeights(gate_EDF=gate, up_EDF=up, down_EFD=down)
        ones = jnp.ones(expert_N1.shape, jnp.float32)
        kind = MlpKind.SWIGLU
        y, _ = apply_experts(x, expert_N1, ones, experts, kind=kind, recipe=RECIPE)

        def dense(e):
            multiply = functools.partial(multiply_fp8, "TD,DF->TF", recipe=RECIPE)
            sums = [multiply(x, w[e]).astype(jnp.float32) for w in (up, gate)]
            return multiply(activated(kind, *sums).astype(jnp.bfloat16), down[e])

        return y, jnp.where(expert_N1 == 0, dense(0), dense(1))

    got, want = (np.asarray(each, np.float64) for each in run(x))
    assert np.linalg.norm(got - want) <= 2.0**-8 * np.linalg.norm(want)


def policy(**settings):
    fp8 = Fp8Matmuls(**{"sites": (Site.PROJECTION, Site.EXPERTS)} | settings)
    return policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=fp8))


def test_layers_out_of_8_bits_have_their_experts_out_too():
    """Casts of a token model's program: of experts there are none where all layers stay out."""
    config = tiny_moe()

    def program(policy):
        model = define_model(config, execution_on(policy=policy, unroll=config.num_layers))
        tree = merged(model.shapes, model.state_shapes)
        ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        return str(jax.make_jaxpr(lambda tree, ids: model.bind(tree).hidden(ids))(tree, ids))

    inside, out = (
        program(policy(sites=(Site.EXPERTS,), first_layers_out=layers))
        for layers in (0, config.num_layers)
    )
    assert "f8_e4m3fn" in inside
    assert "f8_e4m3fn" not in out
