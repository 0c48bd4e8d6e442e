"""Casts of a matrix and its transpose in one kernel on a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.both_ways_cases import (
    CALLS,
    FORMS,
    cast,
    check_beside_float64,
    check_beside_xla,
    matrices,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_casts_as_steps_apart_do(name, form):
    inputs = matrices(384, 640, specials=True)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        options = {"dtype": dtype, "power_of_two": form == "1x128"}
        got, again = (cast(name, form, inputs, implementation="hopper", **options) for _ in "ab")
        check_beside_xla(name, got, cast(name, form, inputs, implementation="xla", **options))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_float64(name, form):
    inputs = matrices(256, 384)
    check_beside_float64(name, form, cast(name, form, inputs, implementation="hopper"), inputs)
