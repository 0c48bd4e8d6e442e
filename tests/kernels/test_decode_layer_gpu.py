"""Layers in one launch on a Hopper GPU, against the formula in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_layer, layer_tail
from tests.kernels.layer_cases import LayerCase, exact_tail, tail_operands
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

SIZES = {"small": (2048, 1024, 1024), "odd": (2176, 1408, 1152), "1b": (2048, 2048, 8192)}
CASES = {
    "one token": LayerCase(length=1),
    "page ends": LayerCase(length=128),
    "page begins": LayerCase(length=129, size=32),
    "long": LayerCase(length=2500, size=128),
    "wide heads": LayerCase(length=700, N=32, K=8, H=128),
    "1b": LayerCase(length=2048, N=32, K=8, F=8192),
}


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_a_tail_is_right_and_repeats_bit_for_bit(size, scale_dtype):
    D, A, F = SIZES[size]
    given = tail_operands(1, D, A, F, scale_dtype=jnp.dtype(scale_dtype))
    f = jax.jit(functools.partial(layer_tail, implementation="hopper"))
    first, counter = f(*given, jnp.zeros(1, jnp.int32))
    assert_within_rounding(first, exact_tail(given))
    assert counter[0] == 3 * 132
    for _ in range(50):
        again, counter = f(*given, counter)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(first))
    assert counter[0] == 51 * 3 * 132


@pytest.mark.parametrize("name", list(CASES))
def test_a_layer_is_right_and_repeats_bit_for_bit(name):
    case = CASES[name]
    given = case.arguments()
    f = jax.jit(functools.partial(decode_layer, implementation="hopper"))
    *first, counter = f(*given, jnp.zeros(1, jnp.int32))
    want, *pools = case.exact(given)
    assert_within_rounding(first[0], want)
    for got, true in zip(first[1:], pools, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), true.value, rtol=2.0**-7, atol=2.0**-12
        )
    for _ in range(20):
        *again, counter = f(*given, counter)
        for a, b in zip(again, first, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert counter[0] == 21 * 5 * 132


def test_a_row_without_a_token_attends_to_nothing():
    x, weights, k, v, tables, positions, rope = LayerCase(length=70).arguments()
    f = jax.jit(functools.partial(decode_layer, implementation="hopper"))
    counter = jnp.zeros(1, jnp.int32)
    got, k_after, v_after, _ = f(x, weights, k, v, tables, positions * 0 - 1, rope, counter)
    nothing = np.zeros((1, weights.out.shape[0]), x.dtype)
    tail = x, nothing, weights.out, weights.mlp_norm, weights.gate_up, weights.down
    assert_within_rounding(got, exact_tail(tail))
    for after, before in ((k_after, k), (v_after, v)):
        np.testing.assert_array_equal(np.asarray(after), before)
