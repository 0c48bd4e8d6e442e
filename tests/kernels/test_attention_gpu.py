"""The shared cases on a Hopper GPU: its kernels, cuDNN, and the portable path compiled for it.

Of all widths, masks and both 16-bit dtypes, forward and gradients; long ones come first, for they
take longest.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError
from pallas_kernels.common import device
from tests.kernels import attention_cases as cases
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

FLOAT16 = {"causal", "everything", "gqa-8", "long-causal", "long-everything", "long-80", "long-96",
           "long-mla", "long-192", "long-256"}  # fmt: skip
# The split backward is the fused one and a kernel for dQ: short cases where that has few tiles.
SPLIT = {"causal", "causal-more-queries", "decode", "lengths", "sinks-empty-rows", "everything",
         "long-everything", "long-256"}  # fmt: skip
# Near copies take minutes: of a long case in float16, short ones have the same code; a split
# backward that is long is seen with a mask of everything, with wide heads and with two widths.
LONG_SPLIT = {"long-everything", "long-256", "long-mla"}


def marks(case, dtype, backward):
    if case not in cases.LONG or (dtype == "bfloat16" and backward == "fused"):
        return ()
    copy = dtype == "float16" or case.name not in LONG_SPLIT
    return (pytest.mark.slow,) if copy else ()


GRID = [
    pytest.param(
        *(case, dtype, backward),
        id=f"{case.name}-{dtype}-{backward}",
        marks=marks(case, dtype, backward),
    )
    for case in (*cases.LONG, *cases.CASES)
    for dtype in ("bfloat16", "float16")
    for backward in ("fused", "split")
    if dtype == "bfloat16" or case.name in FLOAT16
    if backward == "fused" or case.name in SPLIT or (case in cases.LONG and dtype == "bfloat16")
]
BY_CUDNN = {"full", "causal", "window-left", "window-of-two", "scale", "outliers",
            "outliers-causal", "mha", "gqa-3", "gqa-8", "mqa", "width-80",
            "width-96", "width-256"}  # fmt: skip


def slow(*names):
    """Cases that repeat bit for bit if the others do: their sums are kept in the same order."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


PORTABLE = ("causal", "everything", "bias", "sinks-empty-rows", "mla")


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    if device.target().capability != (9, 0):
        pytest.skip("needs an NVIDIA Hopper GPU (compute capability 9.0)")


@pytest.mark.parametrize(("case", "dtype", "backward"), GRID)
def test_hopper(case, dtype, backward):
    if case.bias is not None or (case.scale is not None and case.scale <= 0):
        with pytest.raises(UnsupportedError, match=r"bias|scale"):
            cases.run(case, jnp.dtype(dtype), implementation="hopper")
        return
    got = cases.run(case, jnp.dtype(dtype), implementation="hopper", backward=backward)
    assert_within_rounding(got, cases.expected(case, dtype), what=f"hopper {case.name}")


@pytest.mark.parametrize("name", ["long-packed", "long-256", *slow("long-causal", "long-mla")])
def test_split_backward_repeats_bit_for_bit(name):
    first, second = (
        cases.run(cases.NAMED[name], jnp.bfloat16, implementation="hopper", backward="split")
        for _ in range(2)
    )
    for got, want in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


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
