"""Matmul of operands in e4m3 with one scale per row of each.

Dims: M row of a and of the result, N row of b and column of the result, K contracted.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import device
from pallas_kernels.common.scales import BLOCK

from .hopper_few_rows import MOST_ROWS, few_rows_hopper
from .hopper_many_rows import many_rows_hopper

ROW_MULTIPLE = 8  # of a tile that the TMA copies
COLUMN_MULTIPLE = 64


def unsupported_by_rows(N: int, K: int) -> str | None:
    """Returns why no kernel can multiply by a weight [N, K]; None if one can."""
    if reason := device.why_not_one_hopper():
        return reason
    if N % COLUMN_MULTIPLE or K % BLOCK:
        return f"N={N} and K={K}: it takes multiples of {COLUMN_MULTIPLE} and {BLOCK}"
    return None


def matmul_by_rows(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: jnp.dtype,
    uses_kernel: bool,
) -> jax.Array:
    """Computes ``(a_scale a) (b_scale b)^T``, [M, N] in ``out_dtype``.

    Args:
        a_MK, b_NK: float8_e4m3fn.
        a_scale, b_scale: float32 [M] and [N], which multiply the sums.
        uses_kernel: whether a Hopper kernel multiplies (``unsupported_by_rows``); otherwise XLA.
    """
    if not uses_kernel:
        dims = (((1,), (1,)), ((), ()))
        a, b = a_MK.astype(jnp.float32), b_NK.astype(jnp.float32)
        sums = lax.dot_general(a, b, dims, precision="highest")
        return (sums * a_scale[:, None] * b_scale[None]).astype(out_dtype)
    rows = a_MK.shape[0]
    more = -rows % ROW_MULTIPLE
    if more:
        a_MK, a_scale = jnp.pad(a_MK, ((0, more), (0, 0))), jnp.pad(a_scale, (0, more))
    kernel = few_rows_hopper if rows <= MOST_ROWS else many_rows_hopper
    return kernel(a_MK, b_NK, a_scale, b_scale, out_dtype=out_dtype)[:rows]
