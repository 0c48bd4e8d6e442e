"""The FP8 kernel on a Hopper GPU: its error beside that of rounding, at short and long lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention, flash_attention_fp8, quantize_fp8
from pallas_kernels.common import device

pytestmark = pytest.mark.gpu

# Of a number rounded to 3 bits of mantissa the error is uniform within 2**-4 of it at most.
RMS_OF_ROUNDING = 2.0**-4 / 3**0.5


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    if device.target().capability != (9, 0):
        pytest.skip("needs an NVIDIA Hopper GPU (compute capability 9.0)")


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("H", "T"),
    [
        (128, 300),
        (128, 16384),
        (64, 300),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((128, 4096), (64, 8192))),
    ],
)
def test_error_is_that_of_rounding(H, T, causal):
    """Against fp32 with the same e4m3 operands only the probabilities' rounding is left."""
    keys = jax.random.split(jax.random.key(T), 3)
    q, k, v = (
        # Drawn in fp32: bf16's coarse grid of draws has a mean, so that all keys are rounded alike.
        jax.random.normal(key, (1, T, heads, H), jnp.float32).astype(jnp.bfloat16)
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    )
    operands = quantize_fp8(q, k, v)
    options = {"is_causal": causal, "return_residual": True}
    got, lse = flash_attention_fp8(operands, implementation="hopper", **options)
    want, exact_lse = flash_attention_fp8(
        operands, implementation="xla", dtype="float32", **options
    )
    np.testing.assert_allclose(lse, exact_lse, atol=2e-3)
    assert relative(got, want) < RMS_OF_ROUNDING
    # All of it, against bf16 operands: operands' rounding is as large as the probabilities'.
    whole = flash_attention(
        *(x.astype(jnp.float32) for x in (q, k, v)), is_causal=causal, implementation="xla"
    )
    assert relative(got, whole) < 3 * RMS_OF_ROUNDING
