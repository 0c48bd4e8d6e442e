"""The formula: what a quantized weight stands for, and the product with that.

Dims: M row of x, K contracted, N column, G group of rows.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import pinned_einsum

from .codes import weight_codes
from .weight import QuantizedWeight, WeightCode

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Of NF4's codes (Dettmers et al. 2023, QLoRA, appendix E)."""
MIDDLE = 8
"""The zero point of int4 where none are given."""


def weight_values(weight: QuantizedWeight) -> jax.Array:
    """``code - zero``, float32 [*, K, N]: the weight but for its scales, in the data's order."""
    form, (rows, _) = weight.format, weight.matrix_shape
    codes = weight_codes(weight)
    if form.code is WeightCode.NF4:
        return jnp.asarray(NF4_VALUES, jnp.float32)[codes]
    values = codes.astype(jnp.float32)
    if weight.zeros is not None:
        return values - spread_rows(weight.zeros.astype(jnp.float32), form.group_rows, rows)
    return values - float(MIDDLE) if form.code is WeightCode.INT4 else values


def spread_rows(of_groups: jax.Array, group: int, num_rows: int) -> jax.Array:
    """What each group of rows has, for each of ``num_rows``; as it is where all share one."""
    if of_groups.shape[-2] == 1:
        return of_groups
    return jnp.repeat(of_groups, group, axis=-2)[..., :num_rows, :]


def weight_scales(weight: QuantizedWeight) -> jax.Array:
    """The scales, float32, such that they broadcast over the weight's rows and columns."""
    form, (rows, columns) = weight.format, weight.matrix_shape
    scales = spread_rows(weight.scales.astype(jnp.float32), form.group_rows, rows)
    if scales.shape[-1] == 1 or form.group_columns == 1:
        return scales
    return jnp.repeat(scales, form.group_columns, axis=-1)[..., :columns]


def dequantized_rows(weight: QuantizedWeight, dtype: jnp.dtype) -> jax.Array:
    """The weight as a matrix [*, K, N]: in fp32, rounded once to ``dtype``."""
    weight = weight.plain
    rows = (weight_values(weight) * weight_scales(weight)).astype(dtype)
    if weight.order is None:
        return rows
    back = jnp.argsort(weight.order, axis=-1)
    return jnp.take_along_axis(rows, back[..., None], axis=-2)


def quantized_matmul_reference(
    x_MK: jax.Array, weight: QuantizedWeight, *, out_dtype: jnp.dtype
) -> jax.Array:
    """``x weight`` of the whole dequantized weight, in x's dtype, summed in fp32."""
    w_KN = dequantized_rows(weight, x_MK.dtype)
    return pinned_einsum("mk,kn->mn", x_MK, w_KN, result=out_dtype)
