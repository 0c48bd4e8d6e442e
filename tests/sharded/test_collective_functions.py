"""Collectives by name: what arrives, the gradient, and the bytes a compiled program sends."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.hlo.program import Collective, collectives
from jaxinfra.parallel import collectives as c

OUTER, INNER = 2, 4
N = OUTER * INNER
BOTH = ("outer", "inner")
BLOCK = (16, 6)
BLOCK_BYTES = 4 * math.prod(BLOCK)


def blocks(dtype=np.float32) -> np.ndarray:
    """One block a device; whole numbers, so that sums are exact in any order."""
    return np.random.default_rng(0).integers(-50, 50, (N, *BLOCK)).astype(dtype)


@functools.cache
def mesh():
    return jax.make_mesh((OUTER, INNER), BOTH, axis_types=(AxisType.Auto,) * 2)


def on_devices(function):
    """Jitted: [N, ...] blocks in, [N, ...] blocks out, one a device."""

    def local(x):
        return function(x[0])[None]

    return jax.jit(
        jax.shard_map(
            local, mesh=mesh(), in_specs=PartitionSpec(BOTH), out_specs=PartitionSpec(BOTH)
        )
    )


def swapped(x: np.ndarray) -> np.ndarray:
    """Part j of device i becomes part i of device j."""
    return x.reshape(N, N, -1, *x.shape[2:]).swapaxes(0, 1).reshape(x.shape)


CASES = {
    "all_gather": (
        functools.partial(c.all_gather, axis=BOTH),
        lambda x: np.stack([np.concatenate(x)] * N),
        "all_gather",
    ),
    "reduce_scatter": (
        functools.partial(c.reduce_scatter, axis=BOTH),
        lambda x: x.sum(0).reshape(N, -1, BLOCK[1]),
        "reduce_scatter",
    ),
    "all_reduce": (
        functools.partial(c.all_reduce, axis=BOTH),
        lambda x: np.stack([x.sum(0)] * N),
        "all_reduce",
    ),
    "all_to_all": (
        functools.partial(c.all_to_all, axis=BOTH),
        swapped,
        "all_to_all",
    ),
    "shift": (
        functools.partial(c.shift, axis=BOTH),
        lambda x: np.roll(x, 1, axis=0),
        "shift",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_arrives(name):
    function, expected, _ = CASES[name]
    np.testing.assert_array_equal(on_devices(function)(blocks()), expected(blocks()))


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_the_transpose(name):
    """Of a linear function: <d, f(x)> = <f'(d), x> for every x, here in whole numbers."""
    function, expected, _ = CASES[name]
    x, y = blocks(), expected(blocks())
    d = np.random.default_rng(1).integers(-9, 9, y.shape).astype(np.float32)
    run = on_devices(function)
    (transposed,) = jax.jit(lambda x, d: jax.vjp(run, x)[1](d))(x, d)
    probe = np.random.default_rng(2).integers(-9, 9, x.shape).astype(np.float32)
    left = np.vdot(d.astype(np.float64), expected(probe))
    assert left == np.vdot(np.asarray(transposed, np.float64), probe)


def compiled(function) -> list[Collective]:
    return collectives(on_devices(function).lower(blocks()).compile())


@pytest.mark.parametrize("name", CASES)
def test_bytes_sent_are_the_formula(name):
    function, _, kind = CASES[name]
    found = compiled(function)
    whole = BLOCK_BYTES * (N if kind in ("all_gather",) else 1)
    assert sum(each.sent_bytes for each in found) == sent_bytes(kind, whole, N)


def test_an_all_reduce_hardly_depends_on_the_number_of_devices():
    sizes = [sent_bytes("all_reduce", 1 << 20, n) / (1 << 20) for n in (2, 8, 1024)]
    assert sizes == [1.0, 1.75, 2 * 1023 / 1024]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_send_carries_several_dtypes_bit_for_bit(dtype):
    x = blocks().astype(jnp.dtype(dtype))[:, None]
    sums = np.random.default_rng(1).standard_normal((N, 1, 16, 2, 3)).astype(np.float32)
    sums[:, 0, 0, 0, 0] = np.nan  # quiet or not, its bits are data
    ids = np.arange(N * 16, dtype=np.int32).reshape(N, 1, 16)

    def local(tree):
        mine = jax.tree.map(lambda x: x[0], tree)
        return jax.tree.map(lambda x: x[None], c.shift_together(mine, BOTH))

    spec = PartitionSpec(BOTH)
    run = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=spec, out_specs=spec))
    tree = (x, {"sums": sums, "ids": ids, "none": None})
    got = run(tree)
    chex.assert_trees_all_equal(got, jax.tree.map(lambda x: np.roll(x, 1, axis=0), tree))
    assert len(collectives(run.lower(tree).compile())) == 1
