"""The reference of scaled matmuls: ``sum_k (a scale_a) (b scale_b)``, from dequantized operands.

Dims: M row of a, N row of b, K contracted.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.scales import dequantized


def scaled_matmul_reference(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Dequantizes both operands and multiplies in ``dtype``: [M, N]. In float64 only sums round."""
    a, b = (dequantized(x, scale, dtype=dtype) for x, scale in ((a_MK, a_scale), (b_NK, b_scale)))
    return jnp.einsum("mk,nk->mn", a, b, precision="highest")
