"""Every implementation against the float64 oracle, on every kind of mask, forward and backward."""

import jax.numpy as jnp
import pytest

from pallas_kernels.flash_attention import xla
from tests.kernels import attention_cases as cases
from tests.tolerance import assert_within_rounding

GRID = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases.CASES
    for dtype in case.dtypes
]


@pytest.mark.quick_cases(
    "everything-bfloat16",
    "mla-bfloat16",
)
@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_reference_and_xla(case, dtype, monkeypatch):
    oracle = cases.expected(case, dtype)
    reference = cases.run(case, jnp.dtype(dtype), implementation="reference")
    assert_within_rounding(reference, oracle, what=f"reference {case.name}")
    # Small chunks, so that these lengths make several, with a ragged last one.
    monkeypatch.setattr(xla, "MAX_CHUNK", 32)
    got = cases.run(case, jnp.dtype(dtype), implementation="xla")
    assert_within_rounding(got, oracle, what=f"xla {case.name}")


@pytest.mark.parametrize("name", ["causal-more-queries", "bias"])
def test_xla_in_one_chunk(name):
    case = cases.NAMED[name]
    got = cases.run(case, jnp.float32, implementation="xla")
    assert_within_rounding(got, cases.expected(case, "float32"), what=f"xla {name}")
