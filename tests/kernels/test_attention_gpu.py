"""The shared cases on a Hopper GPU: its kernels, cuDNN, and the portable path compiled for it.

Of all widths, masks and both 16-bit dtypes, forward and gradients; long ones come first, for they
take longest.
"""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels import UnsupportedError
from tests.kernels import attention_cases as cases
from tests.tolerance import assert_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

FLOAT16 = {"causal", "everything", "gqa-8", "long-causal", "long-everything", "long-80", "long-96",
           "long-mla", "long-192", "long-256"}  # fmt: skip


def marks(case, dtype):
    # Near copies take minutes: of a long case in float16, short ones have the same code.
    return (pytest.mark.slow,) if case in cases.LONG and dtype == "float16" else ()


GRID = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}", marks=marks(case, dtype))
    for case in (*cases.LONG, *cases.CASES)
    for dtype in ("bfloat16", "float16")
    if dtype == "bfloat16" or case.name in FLOAT16
]
BY_CUDNN = {"full", "causal", "window-left", "window-of-two", "scale", "outliers",
            "outliers-causal", "mha", "gqa-3", "gqa-8", "mqa", "width-80",
            "width-96", "width-256"}  # fmt: skip


PORTABLE = ("causal", "everything", "bias", "sinks-empty-rows", "mla")


@pytest.mark.parametrize(("case", "dtype"), GRID)
def test_hopper(case, dtype):
    if case.bias is not None or (case.scale is not None and case.scale <= 0):
        with pytest.raises(UnsupportedError, match=r"bias|scale"):
            cases.run(case, jnp.dtype(dtype), implementation="hopper")
        return
    got = cases.run(case, jnp.dtype(dtype), implementation="hopper")
    assert_within_rounding(got, cases.expected(case, dtype), what=f"hopper {case.name}")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_cudnn_is_exact_or_refuses(case):
    if case.name in BY_CUDNN and case.T % 2:
        with pytest.raises(UnsupportedError, match="odd lengths"):
            cases.run(case, jnp.bfloat16, residual=False, implementation="cudnn")
        case = dataclasses.replace(case, T=case.T + 1, S=case.S + 1)

    def run():
        return cases.run(case, jnp.bfloat16, residual=False, implementation="cudnn")

    if case.name not in BY_CUDNN:
        with pytest.raises(UnsupportedError):
            run()
        return
    oracle = cases.expected(case, "bfloat16", residual=False)
    assert_within_rounding(run(), oracle, what=f"cudnn {case.name}")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_forms(name, dtype, implementation):
    case = cases.NAMED[name]
    got = cases.run(case, jnp.dtype(dtype), implementation=implementation)
    assert_within_rounding(got, cases.expected(case, dtype), what=f"{implementation} {name}")
