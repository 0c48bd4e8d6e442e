"""Products of operands in 8 bits: by kernels where a device has them, by XLA's partitioner where it
spreads them over a mesh.

Dims: M row of a and of the result, N row of b and column of the result, K contracted; others in
front of M belong to sequences.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import Quantized, Scaling, spread
from pallas_kernels.fp8 import scaled_matmul


def product(
    a: Quantized,
    b: Quantized,
    *,
    forms: tuple[Scaling, Scaling],
    out: jnp.dtype,
    compute: jnp.dtype,
    num_devices: int,
) -> jax.Array:
    """``sum_k (a scale)[..., m, k] (b scale)[n, k]``; where both have dims in front, summed over
    those too.

    Args:
        forms: of the scales of a and b.
        out: dtype of the result, rounded to from fp32.
        compute: what XLA dequantizes blocks to, where it spreads them over GPUs.
        num_devices: over which it spreads them.
    """
    if a.values.ndim == 2:
        return scaled_matmul(
            a.values, b.values, a.scale, b.scale, out_dtype=out, num_devices=num_devices
        )
    lead = "uvwxyz"[: a.values.ndim - 2]
    spec = f"{lead}mk,{lead}nk->mn" if b.values.ndim > 2 else f"{lead}mk,nk->{lead}mn"
    dequantized = functools.partial(_dequantized, spec=spec, forms=forms, out=out)
    return lax.platform_dependent(
        a,
        b,
        cuda=functools.partial(dequantized, dtype=compute),
        default=functools.partial(dequantized, dtype=ACCUMULATOR),
    )


def _dequantized(
    a: Quantized,
    b: Quantized,
    *,
    spec: str,
    forms: tuple[Scaling, Scaling],
    out: jnp.dtype,
    dtype: jnp.dtype,
) -> jax.Array:
    """Of operands multiplied with their scales before, in ``dtype``."""

    def widened(x: Quantized, form: Scaling) -> jax.Array:
        return (x.values.astype(ACCUMULATOR) * _each(x, form)).astype(dtype)

    sides = (widened(x, form) for x, form in zip((a, b), forms, strict=True))
    result = jnp.einsum(spec, *sides, preferred_element_type=ACCUMULATOR, precision="highest")
    return result.astype(out)


def _each(x: Quantized, form: Scaling) -> jax.Array:
    """The scale of each element, with as many dims as the values."""
    each = spread(form, x.scale, *x.values.shape[-2:])
    return each.reshape((1,) * (x.values.ndim - each.ndim) + each.shape)
