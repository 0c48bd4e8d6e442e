"""Grouped products on a Hopper GPU: blocks share a counter and gather rows. Against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, grouped_swiglu
from tests.kernels import test_grouped_matmul as portable
from tests.kernels.test_grouped_matmul import Case
from tests.tolerance import assert_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

CASES = [
    Case(sizes=(300, 0, 7, 1, 640, 2, 1), num_rows=1003, K=192, N=320),
    Case(sizes=(40, 0, 1500, 9), num_rows=1600, gathered=True, K=256, N=192, dtype="float16"),
    Case(sizes=(130, 200, 54), num_rows=400, gathered=True, listed=True, K=192, N=128),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_and_gradients(case):
    a = portable.arrays_of(case)
    f = functools.partial(grouped_matmul, implementation="hopper", **a.index)
    got = portable.pulled(lambda x, w: f(x, w, a.sizes), a.x, a.gate, d=a.d)
    assert_within_rounding(got, portable.oracle(case, a, gated=False))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_product_and_gradients(case):
    a = portable.arrays_of(case)
    f = functools.partial(grouped_swiglu, implementation="hopper", **a.index)
    run = functools.partial(
        portable.pulled, lambda x, gate, up: f(x, gate, up, a.sizes), a.x, a.gate, a.up, d=a.d
    )
    got = run()
    assert_within_rounding(got, portable.oracle(case, a, gated=True))
    for mine, again in zip(jax.tree.leaves(got), jax.tree.leaves(run()), strict=True):
        np.testing.assert_array_equal(mine, again)


def test_a_block_that_gets_many_tiles_repeats():
    """More tiles than blocks, of very unlike groups: the same bits, whoever computes one."""
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([30, 6000, 1, 0, 900, 700, 400, 161], jnp.int32)
    x, w = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((8192, 512), (8, 512, 1024))
    )
    run = functools.partial(portable.pulled, lambda x, w: grouped_matmul(x, w, sizes), x, w)
    d = jnp.ones((8192, 1024), jnp.bfloat16)
    first = jax.tree.leaves(run(d=d))
    for _ in range(3):
        for mine, again in zip(first, jax.tree.leaves(run(d=d)), strict=True):
            np.testing.assert_array_equal(mine, again)
