"""Products whose format rounds activations to 8 bits: a row of x by its own largest element.

Numbers of 8 bits, the codes of both sides, are numbers of bfloat16 as well: tensor cores of 16 bits
multiply them exactly, and any way to multiply with a weight in few bits serves these. What is given
up is the tensor cores' double rate for 8 bits.

Dims: M row of x, K contracted, N column.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.rounding import keep_rounded

from .reference import dequantized_rows, weight_scales
from .weight import Activations, Arrangement, QuantizedWeight, WeightCode

type CodeProduct = Callable[[jax.Array, QuantizedWeight], jax.Array]
"""Of rows in bfloat16 and a weight, float32."""

_LARGEST = {Activations.INT8: 127.0, Activations.E4M3: 448.0}
_LEAST = 2.0**-60  # of a row's largest element: no scale is 0


def rounded_rows(x_MK: jax.Array, activations: Activations) -> tuple[jax.Array, jax.Array]:
    """x in 8 bits and each row's scale, float32 [M, 1]."""
    x = x_MK.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.maximum(largest, _LEAST) / _LARGEST[activations]
    if activations is Activations.INT8:
        return jnp.clip(jnp.round(x / scale), -127.0, 127.0).astype(jnp.int8), scale
    values = jnp.clip(x / scale, -448.0, 448.0)
    return keep_rounded(values.astype(jnp.float8_e4m3fn)), scale


def product_of_rounded(
    x_MK: jax.Array, weight: QuantizedWeight, product: CodeProduct, *, out_dtype: jnp.dtype
) -> jax.Array:
    """[M, N]: the sums of products of codes, multiplied with both sides' scales.

    Sums are the int32 of XLA for int8 codes in rows, else fp32. Scales that change along the
    contracted dim cannot leave the sum: there both sides are dequantized, to fp32.
    """
    activations = weight.format.activations
    assert activations is not None
    values_MK, scale_M1 = rounded_rows(x_MK, activations)
    if weight.format.group_rows:
        w_KN = dequantized_rows(weight, jnp.float32)
        product_MN = jnp.dot(values_MK.astype(jnp.float32), w_KN, precision="highest")
        return (product_MN * scale_M1).astype(out_dtype)
    if weight.format.code is WeightCode.INT8 and weight.arrangement is Arrangement.ROWS:
        sums_MN = _integer_sums(values_MK, weight).astype(jnp.float32)
    else:
        codes = dataclasses.replace(
            weight,
            scales=jnp.ones_like(weight.scales),
            format=dataclasses.replace(weight.format, activations=None),
        )
        sums_MN = product(values_MK.astype(jnp.bfloat16), codes)
    return (sums_MN * scale_M1 * weight_scales(weight)).astype(out_dtype)


def _integer_sums(values_MK: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """int32 [M, N]."""
    if weight.order is not None:
        values_MK = jnp.take(values_MK, weight.order, axis=1)
    dims = (((1,), (0,)), ((), ()))
    sums_MN = lax.dot_general(values_MK, weight.data, dims, preferred_element_type=jnp.int32)
    if weight.zeros is not None:  # sum x (code - zero) = sum x code - zero sum x
        sums_M1 = jnp.sum(values_MK, axis=1, keepdims=True, dtype=jnp.int32)
        sums_MN = sums_MN - sums_M1 * weight.zeros.astype(jnp.int32)
    return sums_MN
