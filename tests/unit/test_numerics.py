"""Policies, the mixed-precision einsum against float64, and the rule of the loss scale."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.precision import (
    LossScaling,
    PolicyName,
    PrecisionConfig,
    WeightGradients,
)
from jaxinfra.numerics.loss_scale import initial_loss_scale, next_loss_scale
from jaxinfra.numerics.policy import POLICIES, policy_of
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.multiply import multiply
from pallas_kernels.common import dot

EPSILON = float(np.finfo(np.float32).eps)
SPEC, SHAPES = "BTD,DNH->BTNH", ((3, 20, 16), (16, 4, 5))


@pytest.mark.parametrize("name", PolicyName)
def test_policies_keep_fp32_masters_and_sums(name):
    policy = POLICIES[name]
    compute = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[name]
    assert (policy.param, policy.compute, policy.accum) == (jnp.float32, compute, jnp.float32)
    x = jnp.ones(3, jnp.float16)
    assert policy.to_compute(x).dtype == compute
    assert policy.to_accum(x).dtype == jnp.float32


@pytest.mark.parametrize("out", ["compute", "accum"])
@pytest.mark.parametrize("name", PolicyName)
def test_mixed_einsum_rounds_operands_and_results_only(name, out):
    """Against float64 on the rounded operands: what is left is fp32 summation and one rounding of
    each result that is not fp32. A weight's gradient is fp32: it has no such rounding.
    """
    policy = POLICIES[name]
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES)
    x = policy.to_compute(x)
    recipe = policy.recipe(Site.PROJECTION)
    einsum = functools.partial(multiply, SPEC, recipe=recipe, out=getattr(policy, out))
    product, pull = jax.vjp(einsum, x, weight)
    cotangent = jnp.asarray(rng.normal(size=product.shape), product.dtype)
    dx, dweight = pull(cotangent)
    assert product.dtype == getattr(policy, out)
    assert (dx.dtype, dweight.dtype) == (policy.compute, jnp.float32)

    def exact(array):
        return np.asarray(array).astype(policy.compute).astype(float)

    x64, weight64, cotangent64 = exact(x), exact(weight), exact(cotangent)
    for got, terms, want in (
        (product, 16, np.einsum(SPEC, x64, weight64)),
        (dx, 20, np.einsum("BTNH,DNH->BTD", cotangent64, weight64)),
        (dweight, 60, np.einsum("BTD,BTNH->DNH", x64, cotangent64)),
    ):
        rounding = 0.0 if got.dtype == jnp.float32 else float(jnp.finfo(got.dtype).eps) / 2
        bound = (rounding + terms * EPSILON) * np.max(np.abs(want))
        assert np.max(np.abs(np.asarray(got, float) - want)) <= bound


@pytest.mark.parametrize("out", ["compute", "accum"])
def test_weight_gradients_are_rounded_where_asked(out):
    """To the fp32 gradient's nearest bf16, and nothing else changes."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES)
    results = {}
    for rounding in WeightGradients:
        policy = policy_of(PrecisionConfig(policy=PolicyName.BF16, weight_gradients=rounding))
        recipe = policy.recipe(Site.PROJECTION)
        einsum = functools.partial(multiply, SPEC, recipe=recipe, out=getattr(policy, out))
        product, pull = jax.vjp(einsum, policy.to_compute(x), weight)
        results[rounding] = (product, *pull(jnp.ones_like(product)))
    (product, dx, exact), (same, same_dx, rounded) = jax.device_get([*results.values()])
    np.testing.assert_array_equal(same, product)
    np.testing.assert_array_equal(same_dx, dx)
    assert rounded.dtype == exact.dtype == jnp.float32
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16).astype(np.float32))
    assert np.any(rounded != exact)


def scales(config: PrecisionConfig, finite: list[bool]) -> list[float]:
    scale = initial_loss_scale(config)
    values = [float(scale.value)]
    for step in finite:
        scale = next_loss_scale(scale, finite=jnp.bool_(step), config=config)
        values.append(float(scale.value))
    return values


def dynamic(start: float, interval: int) -> PrecisionConfig:
    return PrecisionConfig(
        policy=PolicyName.FP16,
        loss_scaling=LossScaling.DYNAMIC,
        initial_loss_scale=start,
        growth_interval=interval,
    )


@pytest.mark.parametrize("count", [1, 3])
def test_one_row_of_a_gpu_is_multiplied_as_two(count):
    """Without Triton's products XLA would make an fp32 copy of the weight for one."""
    recipe = POLICIES[PolicyName.BF16].recipe(Site.LOGITS)
    x, weight = jnp.ones((count, 1, 8)), jnp.ones((5, 8))

    def product(x, weight):
        return multiply("BTD,VD->BTV", x, weight, recipe=recipe, out=recipe.accum)

    lowered = jax.jit(product).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    rows = 2 if count == 1 else count
    assert f"(tensor<{rows}x1x8xbf16>, tensor<5x8xbf16>) -> tensor<{rows}x1x5xf32>" in lowered
    assert product(x, weight).shape == (count, 1, 5)


def test_two_rows_are_the_product_of_one():
    """By each spec whose first dim is a row; others are left as they are."""
    for spec, shapes, rows in (
        ("mk,kn->mn", ((1, 8), (8, 5)), 2),
        ("BTD,DNH->BTNH", ((1, 1, 8), (8, 2, 3)), 2),
        ("BTNH,RNH->BTNR", ((1, 1, 2, 8), (4, 2, 8)), 2),
        ("BTKGH,BLKH->BTKGL", ((1, 1, 2, 1, 8), (1, 4, 2, 8)), 1),
        ("mk,kn->nm", ((1, 8), (8, 5)), 1),
    ):
        a, b = (jnp.arange(float(np.prod(shape))).reshape(shape) % 7 for shape in shapes)
        seen = []

        def product(a, b, spec=spec, seen=seen):
            seen.append(a.shape[0])
            return jnp.einsum(spec, a, b)

        np.testing.assert_array_equal(dot._two_rows(spec, product, a, b), jnp.einsum(spec, a, b))
        assert seen == [rows], spec


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.booleans(), max_size=25), st.integers(1, 4))
def test_dynamic_scale(finite, interval):
    values = scales(dynamic(64.0, interval), finite)
    run = 0
    for step, before, after in zip(finite, values, values[1:], strict=False):
        run = run + 1 if step else 0
        if not step:
            assert after == max(before / 2, 1.0)
        elif run == interval:
            assert after == 2 * before
            run = 0
        else:
            assert after == before


def test_dynamic_scale_stays_between_1_and_overflow():
    assert scales(dynamic(2.0, 9), [False, False, False]) == [2.0, 1.0, 1.0, 1.0]
    assert scales(dynamic(2.0**127, 1), [True, True]) == [2.0**127] * 3


def test_other_scales_never_change():
    none = PrecisionConfig()
    static = PrecisionConfig(loss_scaling=LossScaling.STATIC, initial_loss_scale=8.0)
    assert scales(none, [True, False] * 3) == [1.0] * 7
    assert scales(static, [True, False] * 3) == [8.0] * 7
