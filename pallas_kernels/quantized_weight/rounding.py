"""Quantization of weights, each element rounded to the nearest number of a format.

Dims: K row (the contracted dim), N column, G group of rows, C block of columns.
"""

import itertools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.common.rounding import keep_rounded

from .weight import (
    MIDDLE,
    NF4_VALUES,
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    packed_pairs,
    spread_rows,
)

_LEAST = 2.0**-60  # of a group's largest element: no scale is 0


def round_weight(
    weight: jax.Array,
    form: WeightFormat,
    *,
    num_inputs: int = 1,
    num_leading: int = 0,
    has_zeros: bool = False,
    scale_dtype: jnp.dtype | None = None,
    clip: jax.Array | None = None,
) -> QuantizedWeight:
    """Quantizes a weight to the nearest codes, with each group's scale from its largest element.

    Args:
        weight: [*leading, *inputs, *outputs], floating.
        form: code of the elements, and groups that share a scale.
        num_inputs: number of dims that a product contracts.
        num_leading: number of dims before those, such as layers or experts.
        has_zeros: int4 with zero points: a group's codes cover its least to its largest element,
            and 0. Otherwise codes are symmetric about 0.
        scale_dtype: dtype of the scales, rounded before elements are quantized; default float32.
        clip: factors by which to shrink each group's range, broadcast to the scales [*, G, C].

    Raises:
        InputError: the format has 4 bits and rows do not divide into groups.
    """
    lead, inner = weight.shape[:num_leading], weight.shape[num_leading:]
    inputs, outputs = inner[:num_inputs], inner[num_inputs:]
    rows, columns = math.prod(inputs), math.prod(outputs)
    form.check_rows(rows)
    x = weight.reshape(*lead, rows, columns).astype(jnp.float32)
    least, largest = (_over_groups(x, form, reduce) for reduce in (jnp.min, jnp.max))
    if clip is not None:
        least, largest = least * clip, largest * clip
    kept = jnp.float32 if scale_dtype is None else scale_dtype
    zeros = None
    if has_zeros and form.code is WeightCode.INT4:
        least, largest = jnp.minimum(least, 0.0), jnp.maximum(largest, 0.0)
        scales = keep_rounded((jnp.maximum(largest - least, _LEAST) / 15.0).astype(kept))
        zeros = jnp.clip(jnp.round(-least / scales.astype(jnp.float32)), 0.0, 15.0)
    else:
        size = jnp.maximum(jnp.maximum(-least, largest), _LEAST)
        scales = keep_rounded((size / form.code.largest).astype(kept))
    each = spread_rows(scales.astype(jnp.float32), form.group_rows, rows)
    if form.group_columns > 1:
        each = jnp.repeat(each, form.group_columns, axis=-1)[..., :columns]
    scaled = x / each
    offset = None if zeros is None else spread_rows(zeros, form.group_rows, rows)
    data = _codes(scaled, form, offset)
    if form.code.bits == 4:
        data = packed_pairs(data, form.group_rows)
    return QuantizedWeight(
        data=data,
        scales=scales,
        zeros=None if zeros is None else zeros.astype(jnp.int8),
        format=form,
        inputs=inputs,
        outputs=outputs,
    ).check()


def _codes(scaled: jax.Array, form: WeightFormat, zeros: jax.Array | None) -> jax.Array:
    """Elements over their scales as codes."""
    match form.code:
        case WeightCode.INT4:
            shifted = jnp.round(scaled) + (float(MIDDLE) if zeros is None else zeros)
            return jnp.clip(shifted, 0.0, 15.0).astype(jnp.uint8)
        case WeightCode.INT8:
            return jnp.clip(jnp.round(scaled), -127.0, 127.0).astype(jnp.int8)
        case WeightCode.E4M3:
            return keep_rounded(jnp.clip(scaled, -448.0, 448.0).astype(jnp.float8_e4m3fn))
        case WeightCode.NF4:
            # Halves of double precision, rounded once, are the bounds that bitsandbytes spells out.
            bounds = [(low + high) / 2 for low, high in itertools.pairwise(NF4_VALUES)]
            return jnp.searchsorted(jnp.asarray(bounds, jnp.float32), scaled).astype(jnp.uint8)


def _over_groups(x: jax.Array, form: WeightFormat, reduce) -> jax.Array:
    """``reduce`` over the elements that share a scale, [*, G, C]; edges may be partial."""
    *lead, rows, columns = x.shape
    group, block = form.group_rows or rows, form.group_columns or columns
    pads = [(0, 0)] * len(lead) + [(0, -rows % group), (0, -columns % block)]
    x = jnp.pad(x, pads, mode="edge")  # an element twice changes neither the least nor the largest
    x = x.reshape(*lead, x.shape[-2] // group, group, x.shape[-1] // block, block)
    return reduce(x, axis=(-3, -1))
