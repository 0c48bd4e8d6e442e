"""Layers in one launch on a Hopper GPU, against the formula in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_layers
from tests.kernels.layer_cases import LayerCase, bits, over_devices, pair
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu
LARGE = pytest.mark.xdist_group("several GB")

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


step = functools.partial(decode_layers, implementation="hopper")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LARGE if "8b" in name else ()) for name in CASES]
)
def test_layers_are_right_and_repeat_bit_for_bit(name):
    case = CASES[name]
    given = case.arguments()
    f = jax.jit(step)
    first = f(*given)
    assert_within_rounding(first, case.exact(given))
    case.assert_nothing_else_written(given, first[1])
    for _ in range(20):
        again = f(*given)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs that reach each other")
@pytest.mark.parametrize("name", ["one token", "page begins", "wide heads", "1b"])
def test_two_gpus_share_layers_and_agree_bit_for_bit(name):
    case, mesh = CASES[name], pair()
    given = case.arguments()
    spread, f = case.over(mesh, given), jax.jit(over_devices(mesh, "hopper"))
    first = f(*spread)
    assert_within_rounding(first, case.exact(given))
    case.assert_nothing_else_written(given, first[1])
    np.testing.assert_array_equal(*(bits(shard.data) for shard in first[0].addressable_shards))
    for _ in range(100):
        again = f(*spread)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


def test_a_row_without_a_token_attends_to_nothing():
    case = LayerCase(length=70, layers=2)
    x, layers, pages, tables, positions, rope = case.arguments()
    got, after = jax.jit(step)(x, layers, pages, tables, positions * 0 - 1, rope)
    want, _ = case.exact((x, layers, pages, tables, positions, rope), sees_nothing=True)
    assert_within_rounding(got, want)
    for pool, before in zip(after, pages, strict=True):
        np.testing.assert_array_equal(bits(pool), bits(before))


@pytest.mark.parametrize("page", [-1, 6])
def test_what_is_no_page_of_a_layer_is_none_of_its_neighbors(page):
    case = LayerCase(length=129, layers=3)
    x, layers, pages, tables, *rest = case.arguments()
    assert pages[0].shape[1] == 6
    tables[0, 2] = page
    _, after = jax.jit(step)(x, layers, pages, tables, *rest)
    for pool, before in zip(after, pages, strict=True):
        np.testing.assert_array_equal(bits(pool), bits(before))


@LARGE
@pytest.mark.parametrize("large", ["weights", "pages"])
def test_layers_may_begin_far_into_their_stacks(large):
    """Layers of zeros add nothing to the stream, so two that begin beyond 4 GB are as first ones.

    There are more than the 32 whose arrays would fit in a kernel's parameters one by one.
    """
    F, num_pages = (16_384, 16) if large == "weights" else (1024, 1024)
    case = LayerCase(length=300, K=8, H=128, F=F, layers=2)
    x, layers, pages, *place = case.arguments()
    y, new = jax.jit(step)(x, layers, pages, *place)
    used, before = pages[0].shape[1], 33

    def behind(stack, *more: int):
        widths = [(before, 0), *((0, count) for count in more)]
        return jnp.pad(stack, widths + [(0, 0)] * (stack.ndim - len(widths)))

    behind_zeros = jax.tree.map(behind, layers)
    pools = tuple(behind(jnp.asarray(pool), num_pages - used) for pool in pages)
    stack = behind_zeros.gate_up if large == "weights" else pools[0]
    assert before * stack[0].nbytes > 2**32
    got, after = jax.jit(step, donate_argnums=2)(x, behind_zeros, pools, *place)
    np.testing.assert_array_equal(bits(got), bits(y))
    for pool, wanted in zip(after, new, strict=True):
        np.testing.assert_array_equal(bits(pool[before:, :used]), bits(wanted))
        assert not jnp.any(pool[:before]), "zero weights make zero keys and values"
        assert not jnp.any(pool[before:, used:]), "pages of no row"
