"""The same by XLA: the weight dequantized, columns at a time where the whole would be large.

Dims: M row of x, K contracted, N column.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.dot import pinned_einsum
from pallas_kernels.common.rounding import keep_rounded

from .codes import COLUMNS
from .config import WIDTH
from .reference import dequantized_rows, quantized_matmul_reference, weight_scales
from .weight import Activations, Arrangement, QuantizedWeight, WeightCode

_LARGEST = {Activations.INT8: 127.0, Activations.E4M3: 448.0}
_LEAST = 2.0**-60  # of a row's largest element: no scale is 0


type Transposed = Callable[[QuantizedWeight, jnp.dtype], jax.Array]
"""The matrix that a weight stands for, transposed."""


def quantized_matmul_xla(
    x_MK: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jnp.dtype,
    most_bytes: int | None,
    transposed: Transposed | None = None,
) -> jax.Array:
    """[M, N]; at most ``most_bytes`` of the dequantized weight at a time.

    Args:
        transposed: what dequantizes; None: XLA too.
    """

    def product(piece: QuantizedWeight) -> jax.Array:
        if transposed is None:
            return quantized_matmul_reference(x_MK, piece, out_dtype=out_dtype)
        w_NK = transposed(piece, x_MK.dtype)
        return pinned_einsum("mk,nk->mn", x_MK, w_NK, result=out_dtype)

    if weight.format.activations is not None:
        return _both_rounded(x_MK, weight, out_dtype=out_dtype)
    x_MK, weight = _in_order(x_MK, weight)
    columns = _columns_at_a_time(weight, x_MK.dtype.itemsize, most_bytes)
    count = weight.matrix_shape[1] // columns
    if count == 1:
        return product(weight)

    def part(start: jax.Array) -> jax.Array:
        return product(_columns_of(weight, start, columns))

    parts = lax.map(part, jnp.arange(count, dtype=jnp.int32) * columns)
    return jnp.moveaxis(parts, 0, 1).reshape(x_MK.shape[0], -1)


def input_gradient(d_MN: jax.Array, weight: QuantizedWeight, *, out_dtype: jnp.dtype) -> jax.Array:
    """[M, K]: the cotangent times the transposed weight."""
    w_KN = dequantized_rows(weight, d_MN.dtype)
    return pinned_einsum("mn,kn->mk", d_MN, w_KN, result=out_dtype)


def rounded_rows(x_MK: jax.Array, activations: Activations) -> tuple[jax.Array, jax.Array]:
    """x in 8 bits and each row's scale, float32 [M, 1]."""
    x = x_MK.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.maximum(largest, _LEAST) / _LARGEST[activations]
    if activations is Activations.INT8:
        return jnp.clip(jnp.round(x / scale), -127.0, 127.0).astype(jnp.int8), scale
    values = jnp.clip(x / scale, -448.0, 448.0)
    return keep_rounded(values.astype(jnp.float8_e4m3fn)), scale


def _both_rounded(x_MK: jax.Array, weight: QuantizedWeight, *, out_dtype: jnp.dtype) -> jax.Array:
    """Of 8-bit operands: sums in int32, or in fp32, then multiplied with both sides' scales.

    Scales that change along the contracted dim cannot leave the sum: there both sides are
    dequantized, to fp32.
    """
    activations = weight.format.activations
    assert activations is not None
    x_MK, weight = _in_order(x_MK, weight)
    values_MK, scale_M1 = rounded_rows(x_MK, activations)
    if weight.format.group_rows:
        w_KN = dequantized_rows(weight, jnp.float32)
        product_MN = jnp.dot(values_MK.astype(jnp.float32), w_KN, precision="highest")
        return (product_MN * scale_M1).astype(out_dtype)
    in_columns = weight.arrangement is Arrangement.COLUMNS
    dims = (((1,), (1 if in_columns else 0,)), ((), ()))
    if weight.format.code is WeightCode.INT8:
        sums_MN = lax.dot_general(values_MK, weight.data, dims, preferred_element_type=jnp.int32)
        if weight.zeros is not None:  # sum x (code - zero) = sum x code - zero sum x
            sums_M1 = jnp.sum(values_MK, axis=1, keepdims=True, dtype=jnp.int32)
            sums_MN = sums_MN - sums_M1 * weight.zeros.astype(jnp.int32)
        product_MN = sums_MN.astype(jnp.float32)
    else:

        def widened(values_MK: jax.Array, data_KN: jax.Array) -> jax.Array:
            operands = values_MK.astype(jnp.float32), data_KN.astype(jnp.float32)
            return lax.dot_general(*operands, dims, precision="highest")

        def native(values_MK: jax.Array, data_KN: jax.Array) -> jax.Array:
            return lax.dot_general(values_MK, data_KN, dims, preferred_element_type=jnp.float32)

        product_MN = lax.platform_dependent(values_MK, weight.data, cuda=native, default=widened)
    return (product_MN * scale_M1 * weight_scales(weight)).astype(out_dtype)


def _in_order(x_MK: jax.Array, weight: QuantizedWeight) -> tuple[jax.Array, QuantizedWeight]:
    """The columns of x brought to where the data's rows are."""
    if weight.order is None:
        return x_MK, weight
    return jnp.take(x_MK, weight.order, axis=1), dataclasses.replace(weight, order=None)


def _columns_at_a_time(weight: QuantizedWeight, itemsize: int, most_bytes: int | None) -> int:
    """The most columns, a divisor of all and whole blocks, that are dequantized together."""
    rows, columns = weight.matrix_shape
    block = weight.format.group_columns or 1
    if weight.arrangement is Arrangement.FRAGMENTS:
        block = WIDTH
    if most_bytes is None or rows * columns * itemsize <= most_bytes or columns % block:
        return columns
    blocks = columns // block
    fitting = max(1, most_bytes // (rows * block * itemsize))
    return block * max(n for n in range(1, min(blocks, fitting) + 1) if blocks % n == 0)


def _columns_of(weight: QuantizedWeight, start: jax.Array, columns: int) -> QuantizedWeight:
    """Some columns of a weight, as a weight."""
    block = weight.format.group_columns

    def cut(x: jax.Array | None, by: int) -> jax.Array | None:
        return None if x is None else lax.dynamic_slice_in_dim(x, start // by, columns // by, 1)

    is_fragments = weight.arrangement is Arrangement.FRAGMENTS
    data = cut(weight.data, COLUMNS if is_fragments else 1)
    assert data is not None
    scales = weight.scales if block == 0 else cut(weight.scales, block)
    assert scales is not None
    return dataclasses.replace(
        weight, data=data, scales=scales, zeros=cut(weight.zeros, 1), outputs=(columns,)
    )
