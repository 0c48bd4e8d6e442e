"""Grouped products of 8-bit operands on a Hopper GPU: what tensor cores can do, and one group's
kernel's bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import scaled_grouped_matmul, scaled_matmul
from tests.kernels.grouped_oracle import spans
from tests.kernels.test_scaled_grouped import NUM_ROWS, SIZES, N, operands
from tests.kernels.test_scaled_matmul import E4M3, E5M2
from tests.kernels.test_scaled_matmul_gpu import exact_and_truncated
from tests.tolerance import assert_no_worse

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=["forward", "gradient"])
def test_the_kernel_adds_as_tensor_cores_do(dtypes):
    a, b, a_scale, b_scale, sizes = operands(dtypes)
    f = functools.partial(scaled_grouped_matmul, out_dtype=jnp.float32, implementation="hopper")
    f = jax.jit(f)
    got = np.asarray(f(a, b, a_scale, b_scale, sizes))
    sums = [np.zeros((NUM_ROWS, N)) for _ in range(2)]
    for g, rows in enumerate(spans(SIZES)):
        if rows.stop > rows.start:
            parts = exact_and_truncated(a[rows], b[g], a_scale[:, rows], b_scale[g])
            for total, part in zip(sums, parts, strict=True):
                total[rows] = part
    exact, truncated = sums
    assert_no_worse(got, plain=truncated.astype(np.float32), oracle=exact, what="product")
    again = f(a, b, a_scale, b_scale, sizes)
    np.testing.assert_array_equal(got, again, err_msg="a second run differs")


def test_a_groups_rows_have_the_bits_of_scaled_matmul():
    """bf16, of groups that begin anywhere; rows of no group are 0."""
    a, b, a_scale, b_scale, sizes = operands()
    got = jax.jit(functools.partial(scaled_grouped_matmul, implementation="hopper"))(
        a, b, a_scale, b_scale, sizes
    )
    rows = -NUM_ROWS % 8
    a, a_scale = np.pad(a, ((0, rows), (0, 0))), np.pad(a_scale, ((0, 0), (0, rows)))
    alone = jax.jit(functools.partial(scaled_matmul, implementation="hopper"))
    want = np.zeros((NUM_ROWS, N), np.float32)
    for g, at in enumerate(spans(SIZES)):
        want[at] = np.asarray(alone(a, b[g], a_scale, b_scale[g]), np.float32)[at]
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)
