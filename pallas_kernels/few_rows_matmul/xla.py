"""Products with a quantized weight by XLA, which dequantizes a large weight some columns at a time.

Dims: M row of x, K contracted, N column.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.dot import pinned_einsum
from pallas_kernels.hopper.cluster_sums import WIDTH
from pallas_kernels.quantized_weight import Arrangement, QuantizedWeight, dequantized_rows
from pallas_kernels.quantized_weight.weight import COLUMNS

type Transposed = Callable[[QuantizedWeight, jnp.dtype], jax.Array]
"""Function that dequantizes a weight to its transpose, in a dtype."""


def quantized_matmul_xla(
    x_MK: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jnp.dtype,
    most_bytes: int | None,
    transposed: Transposed | None = None,
) -> jax.Array:
    """Multiplies x by a quantized weight, dequantizing at most ``most_bytes`` at once.

    Args:
        transposed: function that dequantizes the weight to its transpose; None takes XLA.
    """

    def product(piece: QuantizedWeight) -> jax.Array:
        if transposed is None:
            w_KN = dequantized_rows(piece, x_MK.dtype)
            return pinned_einsum("mk,kn->mn", x_MK, w_KN, result=out_dtype)
        w_NK = transposed(piece, x_MK.dtype)
        return pinned_einsum("mk,nk->mn", x_MK, w_NK, result=out_dtype)

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
    """Computes the gradient of x, [M, K]: the cotangent times the transposed weight."""
    w_KN = dequantized_rows(weight, d_MN.dtype)
    return pinned_einsum("mn,kn->mk", d_MN, w_KN, result=out_dtype)


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
