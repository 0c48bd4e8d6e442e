"""Quantization in plain jnp: the reference, and what XLA computes. Dims: R row, C column."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.scales import BLOCK, Quantized, Scaling, spread

from .formula import cast, magnitude, scale_and_inverse


def quantize_xla(
    x_RC: jax.Array,
    scaling: Scaling,
    *,
    dtype: jnp.dtype,
    power_of_two: bool,
    scale: jax.Array | None = None,
) -> Quantized:
    """In fp32; with a given scale of the tensor its own largest element does not matter."""
    x = x_RC.astype(jnp.float32)
    if scale is None:
        largest = _largest(x, scaling)
        scale, inverse = scale_and_inverse(largest, dtype, power_of_two=power_of_two)
    else:
        inverse = 1.0 / scale
    return Quantized(cast(x, spread(scaling, inverse, *x.shape), dtype), scale)


def _largest(x_RC: jax.Array, scaling: Scaling) -> jax.Array:
    """The largest finite magnitude of each tensor, row or block, as scales lie."""
    size = magnitude(x_RC)
    match scaling:
        case Scaling.TENSOR:
            return jnp.max(size)
        case Scaling.ROW:
            return jnp.max(size, axis=1)
    R, C = size.shape
    rows = BLOCK if scaling is Scaling.BLOCK else 1
    size = jnp.pad(size, ((0, -R % rows), (0, -C % BLOCK)))
    blocks = size.reshape(-1, rows, size.shape[1] // BLOCK, BLOCK)
    return jnp.max(blocks, axis=(1, 3)).T
