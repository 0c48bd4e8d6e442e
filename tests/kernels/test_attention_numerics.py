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


def assert_the_formula(case, dtype, plain, oracle):
    """The plain implementation must deserve its part in the bound of the others."""
    if dtype == "float32":
        # Two fp32 programs differ in the order of their sums alone, neither being the better one.
        numpy, factor = cases.oracle(case, jnp.float32, dtype=np.float32), 4.0
    else:
        # The best there can be is the exact result, rounded: a few roundings of p and ds are more.
        rounded = {name: x.astype(dtype) for name, x in oracle.items()}
        numpy = {name: x.astype(plain[name].dtype) for name, x in rounded.items()}
        factor = 16.0
    assert_no_worse(plain, plain=numpy, oracle=oracle, what=f"reference {case.name}", factor=factor)


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_reference_and_xla(case, dtype, monkeypatch):
    plain, oracle = cases.expected(case, dtype)
    assert_the_formula(case, dtype, plain, oracle)
    # Small chunks, so that these lengths make several, with a ragged last one.
    monkeypatch.setattr(xla, "MAX_CHUNK", 32)
    got = cases.run(case, jnp.dtype(dtype), implementation="xla")
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"xla {case.name}")


@pytest.mark.parametrize("name", ["causal-more-queries", "bias"])
def test_xla_in_one_chunk(name):
    case = cases.NAMED[name]
    plain, oracle = cases.expected(case, "float32")
    got = cases.run(case, jnp.float32, implementation="xla")
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"xla {name}")
