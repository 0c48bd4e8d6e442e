"""The same by XLA: cuBLASLt's FP8 matmul on a GPU where scales are of tensors or rows.

XLA's CUDA compiler turns a product of converted 8-bit operands, each times a scalar, into one
cuBLASLt call. Scales of rows leave the product and multiply its rows and columns. Of blocks it
knows nothing: operands are dequantized, to bf16 on a GPU, to fp32 elsewhere.

Dims: M row of a, N row of b, K contracted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.scales import Scaling, dequantized

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
    """Scalars go into the call that cuBLASLt makes, rows and columns are multiplied after it."""
    rows = spec.a is Scaling.ROW or spec.b is Scaling.ROW
    # Of float32 the call writes fp32: what is multiplied after it, or asked for.
    wide = jnp.dtype("float32") if rows or spec.out_dtype == jnp.float32 else spec.out_dtype

    def operand(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x.astype(wide) * scale.astype(wide) if scale.ndim == 0 else x.astype(wide)

    product = jnp.einsum("mk,nk->mn", operand(a_MK, a_scale), operand(b_NK, b_scale))
    if spec.a is Scaling.ROW:
        product = product * a_scale[:, None]
    if spec.b is Scaling.ROW:
        product = product * b_scale[None, :]
    return product.astype(spec.out_dtype)
