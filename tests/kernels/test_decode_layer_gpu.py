"""Layers in one launch on a Hopper GPU, against the formula in fp64."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import decode_layers
from tests.kernels.layer_cases import LayerCase
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

CASES = {
    "one token": LayerCase(length=1),
    "page ends": LayerCase(length=128, layers=3),
    "page begins": LayerCase(length=129, size=32, layers=2),
    "long": LayerCase(length=2500, size=128),
    "odd": LayerCase(length=70, D=2176, N=22, K=2, F=1152),
    "wide heads": LayerCase(length=700, N=32, K=8, H=128, layers=2),
    "int4": LayerCase(length=300, layers=2, form="int4"),
    "int4 of 64": LayerCase(length=70, N=16, K=8, H=128, form="int4 of 64"),
    "e4m3": LayerCase(length=129, layers=2, form="e4m3"),
    "1b": LayerCase(length=2048, N=32, K=8, F=8192),
    "8b": LayerCase(length=2048, D=4096, N=32, K=8, H=128, F=14_336),
    "8b int4": LayerCase(length=2048, D=4096, N=32, K=8, H=128, F=14_336, form="int4"),
    "int8": LayerCase(length=129, layers=2, form="int8 of 128"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_layers_are_right_and_repeat_bit_for_bit(name):
    case = CASES[name]
    given = case.arguments()
    f = jax.jit(functools.partial(decode_layers, implementation="hopper"))
    first = f(*given)
    want, pools = case.exact(given)
    assert_within_rounding((first[0], jax.tree.leaves(first[1])), (want, pools))
    for _ in range(20):
        again = f(*given)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


def test_a_row_without_a_token_attends_to_nothing():
    case = LayerCase(length=70, layers=2)
    x, layers, pages, tables, positions, rope = case.arguments()
    f = jax.jit(functools.partial(decode_layers, implementation="hopper"))
    got, after = f(x, layers, pages, tables, positions * 0 - 1, rope)
    want, _ = case.exact((x, layers, pages, tables, positions, rope), sees_nothing=True)
    assert_within_rounding(got, want)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(pages), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def bits(x) -> np.ndarray:
    """Of 16-bit numbers, NaN among them."""
    return np.asarray(x).view(np.uint16)
