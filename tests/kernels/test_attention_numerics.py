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


@pytest.mark.slow_cases(
    "bias-float32",
    "causal-float32",
    "causal-more-keys-float32",
    "everything-float16",
    "lengths-float32",
    "mha-float32",
    "mqa-float32",
    "packed-bfloat16",
    "packed-cross-float32",
    "sinks-bfloat16",
    "soft-cap-causal-bfloat16",
    "window-float32",
    "window-left-bfloat16",
    "window-of-two-float32",
    "causal-bfloat16",
    "full-float16",
    "gqa-8-float16",
    "outliers-causal-bfloat16",
    "width-72-bfloat16",
    "width-80-bfloat16",
    "width-96-float16",
    "width-112-bfloat16",
    "width-160-bfloat16",
    "width-256-bfloat16",
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
