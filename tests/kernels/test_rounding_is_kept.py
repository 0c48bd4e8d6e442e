"""A cast to 8 bits and back within one program rounds.

XLA for GPUs drops such pairs where it sees them; for CPUs it does not. So the program is read for
what it would see, which takes no GPU, and run on one.
"""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.rounded_cases import ROUNDED, SHAPE, read

LAYS_OUT = {
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice",
    "dynamic_update_slice", "layout_constraint", "pad", "reshape", "rev", "slice", "squeeze",
    "transpose",
}  # fmt: skip
"""Through which XLA follows a number."""
CALLS = {"pjit", "jit", "custom_jvp_call", "custom_vjp_call", "closed_call"}


def is_short(variable, than: int = 4) -> bool:
    """A float of fewer bytes."""
    return jnp.issubdtype(variable.aval.dtype, jnp.floating) and variable.aval.dtype.itemsize < than


def dropped(jaxpr: jax.extend.core.Jaxpr, shortened: list[bool]) -> tuple[list, list[bool]]:
    """Casts back that meet a number just shortened; which results are such numbers.

    Args:
        shortened: of each argument, whether it is one.
    """
    open_ = {v for v, is_open in zip(jaxpr.invars, shortened, strict=True) if is_open}
    found = []
    for equation in jaxpr.eqns:
        reads = [isinstance(v, jax.extend.core.Var) and v in open_ for v in equation.invars]
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        name = equation.primitive.name
        if name in CALLS:
            more, results = dropped(getattr(inner[0], "jaxpr", inner[0]), reads)
            found += more
            open_ |= {v for v, is_open in zip(equation.outvars, results, strict=True) if is_open}
        elif name == "convert_element_type":
            (x,), (y,) = equation.invars, equation.outvars
            if reads[0] and not is_short(y, x.aval.dtype.itemsize + 1):
                found.append(equation)
            if is_short(y, x.aval.dtype.itemsize):
                open_.add(y)
        elif name in LAYS_OUT and any(reads):
            open_ |= set(equation.outvars)
    return found, [isinstance(v, jax.extend.core.Var) and v in open_ for v in jaxpr.outvars]


def casts_dropped(f) -> list:
    """Of a function of the matrix."""
    jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    return dropped(jaxpr.jaxpr, [False])[0]


@pytest.mark.parametrize("name", ROUNDED)
def test_no_cast_can_be_dropped(name):
    assert not casts_dropped(lambda x: read(ROUNDED[name](x)))


def test_a_cast_that_can_be_is_found():
    def pair(x):
        return x.astype(jnp.float8_e4m3fn).T.astype(jnp.float32)

    assert len(casts_dropped(pair)) == len(casts_dropped(jax.jit(pair))) == 1


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
