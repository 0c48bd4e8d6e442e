"""The same by XLA: cuBLASLt's FP8 matmul on a GPU where scales are of tensors or rows.

Scales of tensors and rows leave the product and multiply its rows and columns. Of blocks XLA knows
nothing: operands are dequantized, to bf16 on a GPU, to fp32 elsewhere.

Dims: M row of a, N row of b, K contracted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.scales import dequantized, spread

from .reference import scaled_matmul_reference
from .spec import ScaledSpec


def scaled_matmul_xla(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    accumulate: jax.Array | None,
    *,
    spec: ScaledSpec,
) -> jax.Array:
    """[M, N] in the spec's dtype."""
    if spec.by_blocks:
        cuda = functools.partial(_dequantized_product, spec=spec)
    else:
        cuda = functools.partial(_outer_product, spec=spec)

    def default(a_MK, b_NK, a_scale, b_scale):
        return scaled_matmul_reference(a_MK, b_NK, a_scale, b_scale).astype(spec.out_dtype)

    product = lax.platform_dependent(a_MK, b_NK, a_scale, b_scale, cuda=cuda, default=default)
    return product if accumulate is None else accumulate + product


def _dequantized_product(a_MK, b_NK, a_scale, b_scale, *, spec: ScaledSpec) -> jax.Array:
    # fp16 would overflow; an fp32 product of the operands would be slow.
    a, b = (
        dequantized(x, scale).astype(jnp.bfloat16)
        for x, scale in ((a_MK, a_scale), (b_NK, b_scale))
    )
    product = jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.float32)
    return product.astype(spec.out_dtype)


def _outer_product(a_MK, b_NK, a_scale, b_scale, *, spec: ScaledSpec) -> jax.Array:
    """The 8-bit product by cuBLASLt in fp32, its rows and columns then multiplied.

    Of operands that were converted and scaled before, XLA makes a bf16 product more often than not.
    """
    product = jnp.einsum("mk,nk->mn", a_MK, b_NK, preferred_element_type=jnp.float32)
    of_rows = spread(spec.a, a_scale, *a_MK.shape)
    of_columns = spread(spec.b, b_scale, *b_NK.shape).T
    return (product * of_rows * of_columns).astype(spec.out_dtype)
