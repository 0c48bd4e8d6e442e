"""Changes of quantized weights without dequantizing: joined columns, codes reordered for Hopper.

Dims: K row, N column, G group of rows, C block of columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError

from .weight import (
    Activations,
    Arrangement,
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    fragment_words,
    in_rows,
)

ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 64
GROUPS = (64, 128)


def by_column_format(form: WeightFormat) -> WeightFormat:
    """Returns the same format with one scale per column."""
    return dataclasses.replace(form, group_columns=1)


def by_column(weight: QuantizedWeight) -> QuantizedWeight:
    """Gives each column of a weight its own scale, where blocks of columns share one."""
    weight = in_rows(weight.plain)
    form, columns = weight.format, weight.matrix_shape[1]
    if form.group_columns == 1:
        return weight
    scales = jnp.repeat(weight.scales, form.group_columns or columns, axis=-1)[..., :columns]
    return dataclasses.replace(weight, scales=scales, format=by_column_format(form))


def of_columns(
    weight: QuantizedWeight,
    change: Callable[[jax.Array], jax.Array],
    outputs: tuple[int, ...],
) -> QuantizedWeight:
    """Applies ``change`` to every array, as [*, rows, *outputs], to give other output dims."""
    weight = by_column(weight)
    columns = weight.matrix_shape[1]

    def changed(part: jax.Array) -> jax.Array:
        lead = part.shape[:-1]
        assert part.shape[-1] == columns
        return change(part.reshape(*lead, *weight.outputs)).reshape(*lead, -1)

    return dataclasses.replace(
        weight,
        data=changed(weight.data),
        scales=changed(weight.scales),
        zeros=None if weight.zeros is None else changed(weight.zeros),
        outputs=outputs,
    )


def repeated_outputs(weight: QuantizedWeight, copies: int, *, axis: int) -> QuantizedWeight:
    """Repeats each element of one of the weight's output dims ``copies`` times in a row.

    Args:
        axis: negative index of an output dim.
    """
    outputs = list(weight.outputs)
    outputs[axis] *= copies
    return of_columns(
        weight, functools.partial(jnp.repeat, repeats=copies, axis=axis), tuple(outputs)
    )


def are_alike(weights: Sequence[Any]) -> bool:
    """Returns whether weights with the same input can be joined into one quantized matrix."""
    kinds = {
        (by_column_format(each.format), each.inputs, each.scales.dtype, each.zeros is None)
        for each in weights
        if isinstance(each, QuantizedWeight) and each.order is None
    }
    return len(kinds) == 1 and all(
        isinstance(each, QuantizedWeight) and each.order is None for each in weights
    )


def concatenated_columns(weights: Sequence[QuantizedWeight], *, axis: int) -> QuantizedWeight:
    """Concatenates quantized weights with the same input along an output dim, without dequantizing.

    Args:
        axis: negative index of the output dim along which they are joined.

    Raises:
        InputError: weights differ in format, or one has an ``order`` of rows.
    """
    if not are_alike(weights):
        raise InputError(
            f"weights in {' and '.join(sorted({each.format.name for each in weights}))} side by "
            "side: one matrix has one format, one dtype of scales, zero points or none, and rows "
            "in no order of their own (act-order); keep them apart"
        )
    weights = [by_column(weight) for weight in weights]
    first = weights[0]
    outputs = list(first.outputs)
    outputs[axis] = sum(weight.outputs[axis] for weight in weights)
    shaped = [
        {
            name: part.reshape(*part.shape[:-1], *weight.outputs)
            for name, part in weight.parts.items()
        }
        for weight in weights
    ]
    joined: dict[str, Any] = {
        name: jnp.concatenate([each[name] for each in shaped], axis=axis) for name in shaped[0]
    }
    flat: dict[str, Any] = {
        name: x.reshape(*x.shape[: x.ndim - len(outputs)], -1) for name, x in joined.items()
    }
    return dataclasses.replace(first, **flat, outputs=tuple(outputs))


def why_not_arranged(weight: QuantizedWeight) -> str | None:
    """Returns why a weight cannot be rearranged for the kernels; None if it can."""
    form, (rows, columns) = weight.format, weight.matrix_shape
    if form.code is WeightCode.NF4:
        return "codes of nf4 are no integers: they are looked up"
    if form.activations is not None and form.group_rows:
        return "scales along K stay in the sum"
    if form.group_rows and form.group_rows not in GROUPS:
        return f"groups of {form.group_rows} rows: it takes {GROUPS[0]} and {GROUPS[1]}, or all"
    if form.code is not WeightCode.INT4 and weight.zeros is not None:
        return f"zero points of {form.code}: it subtracts those of int4"
    if rows % ROW_MULTIPLE or columns % COLUMN_MULTIPLE:
        return (
            f"{rows} rows and {columns} columns: it takes multiples of {ROW_MULTIPLE} and "
            f"{COLUMN_MULTIPLE}"
        )
    return None


def arranged(weight: QuantizedWeight) -> QuantizedWeight:
    """Reorders a weight's codes for the kernels, and repeats block scales for each column.

    Codes become MMA fragments. Where the format rounds activations to e4m3, they are transposed.

    Raises:
        UnsupportedError: the kernel does not take the weight's format or size.
    """
    reason = why_not_arranged(weight)
    if reason is not None:
        raise UnsupportedError(
            f"a weight in {weight.format.name}, arranged for a GPU: {reason}; leave it in rows"
        )
    if weight.arrangement is not Arrangement.ROWS:
        return weight
    weight = by_column(weight)
    if weight.format.activations is Activations.E4M3 and weight.order is None:
        data = jnp.swapaxes(weight.data, -1, -2)
        return dataclasses.replace(weight, data=data, arrangement=Arrangement.TRANSPOSED)
    words = functools.partial(fragment_words, form=weight.format)
    for _ in weight.leading:
        words = jax.vmap(words)
    return dataclasses.replace(
        weight,
        data=words(weight.data),
        zeros=None if weight.zeros is None else weight.zeros.astype(jnp.uint16),
        arrangement=Arrangement.FRAGMENTS,
    )
