"""Quantization and scaled matmuls by XLA.

Quantization in plain jnp is also the reference. XLA has no matmul with block scales, so operands
are dequantized: to bf16 on a GPU, to fp32 elsewhere.

Dims: R row, C column of a matrix; M row of a, N row of b, K contracted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.common.rounding import keep_rounded
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling, dequantized, spread

from .formula import cast, magnitude, scale_and_inverse
from .reference import ScaledSpec, scaled_matmul_reference


def quantize_xla(
    x: jax.Array, scaling: Scaling, *, dtype: jnp.dtype, power_of_two: bool
) -> Quantized:
    """Quantizes a matrix by blocks in plain jnp, computed in fp32.

    Args:
        x: [R, C], or several matrices [..., R, C], whose scales have the same leading dims.
    """
    x = x.astype(jnp.float32)
    scale, inverse = scale_and_inverse(_largest(x, scaling), dtype, power_of_two=power_of_two)
    each = spread(scaling, inverse, *x.shape[-2:])
    return Quantized(keep_rounded(cast(x, each, dtype)), scale)


def quantize_across_xla(x: jax.Array, *, dtype: jnp.dtype, power_of_two: bool) -> Quantized:
    """Quantizes the transpose of x by 1x128 blocks, bit for bit as ``quantize_xla`` does.

    Values are transposed after their cast to 8 bits.

    Args:
        x: [..., R, C].

    Returns:
        Values [..., C, R], scales [..., blocks of R, C].
    """
    *lead, R, C = x.shape
    x = x.astype(jnp.float32)
    padding = [(0, 0)] * len(lead) + [(0, -R % BLOCK), (0, 0)]
    blocks = jnp.pad(magnitude(x), padding).reshape(*lead, -(-R // BLOCK), BLOCK, C)
    scale, inverse = scale_and_inverse(jnp.max(blocks, axis=-2), dtype, power_of_two=power_of_two)
    each = jnp.repeat(inverse, BLOCK, axis=-2)[..., :R, :]
    values = cast(x, each, dtype)
    if x.ndim == 2:
        # Left to XLA, the matrix is transposed in fp32 before it is cast: three times as slow.
        values = with_layout_constraint(values, Layout(major_to_minor=(0, 1)))
    return Quantized(keep_rounded(jnp.swapaxes(values, -1, -2)), scale)


def _largest(x: jax.Array, scaling: Scaling) -> jax.Array:
    """The largest finite magnitude of each block, in the order of scales."""
    size = magnitude(x)
    *lead, R, C = size.shape
    rows = BLOCK if scaling is Scaling.BLOCK else 1
    padding = [(0, 0)] * len(lead) + [(0, -R % rows), (0, -C % BLOCK)]
    size = jnp.pad(size, padding)
    blocks = size.reshape(*lead, size.shape[-2] // rows, rows, size.shape[-1] // BLOCK, BLOCK)
    return jnp.swapaxes(jnp.max(blocks, axis=(-3, -1)), -1, -2)


def scaled_matmul_xla(
    a_MK: jax.Array,
    b_NK: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    spec: ScaledSpec,
) -> jax.Array:
    """Multiplies dequantized operands by XLA: [M, N] in the spec's dtype."""
    cuda = functools.partial(_dequantized_product, spec=spec)

    def default(a_MK, b_NK, a_scale, b_scale):
        return scaled_matmul_reference(a_MK, b_NK, a_scale, b_scale).astype(spec.out_dtype)

    return lax.platform_dependent(a_MK, b_NK, a_scale, b_scale, cuda=cuda, default=default)


def _dequantized_product(a_MK, b_NK, a_scale, b_scale, *, spec: ScaledSpec) -> jax.Array:
    # fp16 would overflow; an fp32 product of the operands would be slow.
    a, b = (
        dequantized(x, scale).astype(jnp.bfloat16)
        for x, scale in ((a_MK, a_scale), (b_NK, b_scale))
    )
    product = jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.float32)
    return product.astype(spec.out_dtype)
