"""A cast to 8 bits and back within one program rounds.

XLA for GPUs drops such pairs where it sees them; for CPUs it does not. So the program is read for
what it would see, which takes no GPU, and run on one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dropped_casts import casts_dropped
from tests.kernels.rounded_cases import ROUNDED, SHAPE, read


def dropped(f) -> list:
    """Of a function of the matrix."""
    return casts_dropped(jax.make_jaxpr(f)(jax.ShapeDtypeStruct(SHAPE, jnp.float32)).jaxpr)


@pytest.mark.parametrize("name", ROUNDED)
def test_no_cast_can_be_dropped(name):
    assert not dropped(lambda x: read(ROUNDED[name](x)))


def test_a_cast_that_can_be_is_found():
    def pair(x):
        return x.astype(jnp.float8_e4m3fn).T.astype(jnp.float32)

    def in_loops(x):
        return jax.lax.scan(lambda x, _: (pair(x.T), None), x, length=3)[0]

    for f in (pair, jax.jit(pair), in_loops):
        assert len(dropped(f)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUNDED)
def test_one_program_rounds_as_two(name):
    x = jax.random.normal(jax.random.key(0), SHAPE)
    f = ROUNDED[name]
    if isinstance(jax.eval_shape(f, x), jax.ShapeDtypeStruct):  # read within
        want = f(x)  # operation by operation
    else:
        want = read(jax.jit(f)(x))
    got = jax.jit(lambda x: read(f(x)))(x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)
