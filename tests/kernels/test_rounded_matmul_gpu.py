"""Products that round their input to e4m3, on a Hopper GPU, against what tensor cores can do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows_matmul
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.few_rows_matmul.rounded import rounded_rows
from pallas_kernels.fp8.hopper_few_rows import MOST_ROWS
from pallas_kernels.quantized_weight import Activations, arranged
from tests.kernels.few_rows_cases import FORMATS, weight_of
from tests.kernels.test_scaled_matmul_gpu import as_tensor_cores_add
from tests.tolerance import assert_no_worse

pytestmark = pytest.mark.gpu


def exact_and_truncated(x, weight, *, promoted: bool):
    """The product of rounded rows, and its sums as tensor cores truncate them, in float64."""
    codes, scale = jax.jit(rounded_rows, static_argnums=1)(x, Activations.E4M3)
    a, b = (np.asarray(each.astype(jnp.float32), np.float64) for each in (codes, weight.data.T))
    depth = 128 if promoted else a.shape[1]
    sums = [0.0, 0.0]
    for k in range(0, a.shape[1], depth):
        parts = as_tensor_cores_add(a[:, k : k + depth], b[:, k : k + depth])
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    scales = np.asarray(scale, np.float64) * np.asarray(weight.scales, np.float64)
    return [each * scales for each in sums]


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 300])
def test_rounded_inputs_are_multiplied_in_8_bits(rows):
    weight = weight_of(FORMATS["e4m3, rounding"], shape=(1024, 512))
    x = jnp.asarray(np.random.default_rng(6).normal(size=(rows, 1024)), jnp.bfloat16)
    exact, truncated = exact_and_truncated(x, weight, promoted=rows <= MOST_ROWS)
    f = jax.jit(functools.partial(few_rows_matmul, implementation="hopper"))
    got = f(x, jax.jit(arranged)(weight))
    rounded = jnp.asarray(truncated, jnp.float32).astype(jnp.bfloat16)
    assert_no_worse(got, plain=rounded, oracle=exact)
    np.testing.assert_array_equal(got, f(x, arranged(weight)), err_msg="a second run differs")


def test_a_norm_is_rounded_before_it_is_quantized():
    """Rows whose normalized elements are powers of two, which no rounding changes."""
    weight = weight_of(FORMATS["e4m3, rounding"], shape=(1024, 512))
    signs = np.sign(np.random.default_rng(7).normal(size=(16, 1024)))
    x = jnp.asarray(4.0 * signs, jnp.bfloat16)
    norm = RmsNorm(scale=jnp.full(1024, 2.0, jnp.bfloat16), epsilon=0.0)
    call = jax.jit(functools.partial(few_rows_matmul, implementation="hopper"))
    found = jax.jit(arranged)(weight)
    got = call(x, found, norm=norm)
    want = call(jnp.asarray(2.0 * signs, jnp.bfloat16), found)
    np.testing.assert_array_equal(got, want)
