"""Append and attention in one kernel on a Hopper GPU; NaN lies wherever nobody put anything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import append_and_attend, append_heads, paged_attention
from pallas_kernels.common import device
from tests.kernels import step_cases as cases

pytestmark = pytest.mark.gpu

REPEATS = 50
LAUNCHES = ("in-turn", "overlapped")


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    if device.target().capability != (9, 0):
        pytest.skip("needs an NVIDIA Hopper GPU (compute capability 9.0)")


def chain(arguments, options, *, launches, within):
    """Steps after one another, each of the pools that the last one left, as layers follow."""
    heads, k, v, tables, positions, rope = arguments
    outs = []
    for _ in range(8):
        if within:
            out, k, v = append_and_attend(
                heads, k, v, tables, positions, rope, **options, implementation="hopper",
                launches=launches,
            )  # fmt: skip
        else:
            q, k, v = append_heads(
                heads, k, v, tables, positions, rope, implementation="hopper", launches=launches
            )
            out = paged_attention(
                q, k, v, tables, positions[:, 0] + 1, **options, implementation="hopper",
                launches=launches,
            )  # fmt: skip
        outs.append(out)
    return outs, k, v


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("case", [*cases.SHORT, *cases.LONG], ids=lambda case: case.name)
def test_is_the_definition_and_repeats(case, launches):
    step = cases.step_of(case)
    arguments = jax.tree.map(jnp.asarray, step.arguments)
    f = functools.partial(
        append_and_attend, **step.options, implementation="hopper", launches=launches
    )
    run = jax.jit(f)
    got = jax.device_get(run(*arguments))
    cases.assert_is_step(got, step)
    for _ in range(REPEATS):
        again = jax.device_get(run(*arguments))
        for mine, first in zip(again, got, strict=True):
            np.testing.assert_array_equal(mine.view(np.uint16), first.view(np.uint16))


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("case", cases.LONG, ids=lambda case: case.name)
def test_all_forms_give_the_same_bits(case, launches):
    """Of layers one after another: a kernel that does not wait reads old bits."""
    step = cases.step_of(case, hidden=0.0)
    arguments = jax.tree.map(jnp.asarray, step.arguments)
    forms = {
        within: jax.jit(
            functools.partial(chain, options=step.options, launches=mine, within=within)
        )
        for within, mine in ((False, "in-turn"), (True, launches))
    }
    apart = jax.jit(functools.partial(chain, options=step.options, launches=launches, within=False))
    want = jax.device_get(forms[False](arguments))
    for _ in range(REPEATS):
        for f in (forms[True], apart):
            for mine, true in zip(*map(jax.tree.leaves, (f(arguments), want)), strict=True):
                np.testing.assert_array_equal(
                    np.asarray(mine).view(np.uint16), true.view(np.uint16)
                )
