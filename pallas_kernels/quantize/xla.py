"""Quantization in plain jnp: the reference, and what XLA computes. Dims: R row, C column."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.common.rounding import keep_rounded
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling, spread

from .formula import cast, magnitude, scale_and_inverse


def quantize_xla(
    x: jax.Array,
    scaling: Scaling,
    *,
    dtype: jnp.dtype,
    power_of_two: bool,
    scale: jax.Array | None = None,
    largest: jax.Array | None = None,
) -> Quantized:
    """In fp32; with a given scale of the tensor its own largest element does not matter.

    Args:
        x: [R, C], or several matrices [..., R, C], whose scales have those dims in front too. Of
            all of them there is one scale where it is the tensor's.
        largest: finite float32, as scales lie, in place of x's own.
    """
    x = x.astype(jnp.float32)
    if scale is None:
        largest = _largest(x, scaling) if largest is None else largest
        scale, inverse = scale_and_inverse(largest, dtype, power_of_two=power_of_two)
    else:
        inverse = 1.0 / scale
    each = spread(scaling, inverse, *x.shape[-2:])
    each = each.reshape((1,) * (x.ndim - each.ndim) + each.shape)
    return Quantized(keep_rounded(cast(x, each, dtype)), scale)


def quantize_across_xla(x: jax.Array, *, dtype: jnp.dtype, power_of_two: bool) -> Quantized:
    """The transpose of x by 1x128 blocks, bit for bit ``quantize_xla`` of it: transposed as 8 bits.

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
    """The largest finite magnitude of each tensor, row or block, as scales lie."""
    size = magnitude(x)
    match scaling:
        case Scaling.TENSOR:
            return jnp.max(size)
        case Scaling.ROW:
            return jnp.max(size, axis=-1)
    *lead, R, C = size.shape
    rows = BLOCK if scaling is Scaling.BLOCK else 1
    padding = [(0, 0)] * len(lead) + [(0, -R % rows), (0, -C % BLOCK)]
    size = jnp.pad(size, padding)
    blocks = size.reshape(*lead, size.shape[-2] // rows, rows, size.shape[-1] // BLOCK, BLOCK)
    return jnp.swapaxes(jnp.max(blocks, axis=(-3, -1)), -1, -2)
