"""The static part of a scaled matmul, and its reference: ``sum_k (a scale_a) (b scale_b)``.

Dims: M row of a and of the result, N row of b and column of the result, K contracted.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.scales import Scaling, dequantized, scaling_of

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledSpec:
    """Scalings of both operands of a scaled matmul, and the dtype of its result."""

    a: Scaling
    b: Scaling
    out_dtype: jnp.dtype


def make_scaled_spec(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: jnp.dtype,
) -> ScaledSpec:
    """Returns the spec of a scaled matmul from its arrays.

    Raises:
        InputError: shapes or dtypes disagree.
    """
    forms = scaling_of("a", a, a_scale), scaling_of("b", b, b_scale)
    (M, K), N = a.shape, b.shape[0]
    if b.shape[1] != K:
        raise InputError(
            f"a is {list(a.shape)} and b {list(b.shape)}; both end in the contracted dim: a [M, "
            "K], b [N, K]. Transpose b if it is [K, N]"
        )
    if min(M, N, K) == 0:
        raise InputError(f"a is {list(a.shape)} and b {list(b.shape)}; no dim may be empty")
    if out_dtype not in OUT_DTYPES:
        raise InputError(f"out_dtype={out_dtype.name} must be bfloat16, float16 or float32")
    return ScaledSpec(a=forms[0], b=forms[1], out_dtype=out_dtype)


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
