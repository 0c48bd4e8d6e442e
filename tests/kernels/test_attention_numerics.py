"""Every implementation against the float64 oracle, on every kind of mask, forward and backward."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import xla
from tests.kernels import attention_cases as cases
from tests.tolerance import assert_no_worse

GRID = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases.CASES
    for dtype in case.dtypes
]


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_xla_is_as_accurate_as_the_formula(case, dtype, monkeypatch):
    plain, oracle = cases.expected(case, dtype)
    # Small chunks, so that these lengths make several, with a ragged last one.
    monkeypatch.setattr(xla, "MAX_CHUNK", 32)
    got = cases.run(case, jnp.dtype(dtype), implementation="xla")
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"xla {case.name}")


@pytest.mark.parametrize("name", ["causal-more-queries", "everything", "bias"])
def test_xla_in_one_chunk(name):
    case = cases.NAMED[name]
    plain, oracle = cases.expected(case, "float32")
    got = cases.run(case, jnp.float32, implementation="xla")
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"xla {name}")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_the_formula_is_as_accurate_as_numpy(case):
    got, oracle = cases.expected(case, "float32")
    plain = cases.oracle(case, jnp.float32, dtype=np.float32)
    # Two fp32 programs differ in the order of their sums alone, neither being the better one.
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"reference {case.name}", factor=4.0)
