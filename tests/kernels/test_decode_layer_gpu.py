"""Layers in one launch on a Hopper GPU, against the formula in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_tail
from tests.kernels.layer_cases import exact_tail, operands
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

SIZES = {"small": (2048, 1024, 1024), "odd": (2176, 1408, 1152), "1b": (2048, 2048, 8192)}


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_a_tail_is_right_and_repeats_bit_for_bit(size, scale_dtype):
    D, A, F = SIZES[size]
    given = operands(1, D, A, F, scale_dtype=jnp.dtype(scale_dtype))
    f = jax.jit(functools.partial(layer_tail, implementation="hopper"))
    first, counter = f(*given, jnp.zeros(1, jnp.int32))
    assert_within_rounding(first, exact_tail(given))
    assert counter[0] == 3 * 132
    for _ in range(50):
        again, counter = f(*given, counter)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(first))
    assert counter[0] == 51 * 3 * 132
