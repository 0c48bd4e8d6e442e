"""Weights brought to the order in which the Hopper kernel reads them, once, at load."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import UnsupportedError

from .codes import fragment_words
from .columns import by_column
from .weight import Arrangement, QuantizedWeight, WeightCode

ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 64
GROUPS = (64, 128)


def why_not_arranged(weight: QuantizedWeight) -> str | None:
    """Why the GPU's products have no order for a weight's codes; None: they have."""
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
    """The same weight as the kernel reads it; scales of blocks are repeated for each column.

    Raises:
        UnsupportedError: a format or a size that the kernel does not take.
    """
    reason = why_not_arranged(weight)
    if reason is not None:
        raise UnsupportedError(
            f"a weight in {weight.format.name}, arranged for a GPU: {reason}; leave it in rows"
        )
    if weight.arrangement is not Arrangement.ROWS:
        return weight
    weight = by_column(weight)
    words = functools.partial(fragment_words, form=weight.format)
    for _ in weight.leading:
        words = jax.vmap(words)
    return dataclasses.replace(
        weight,
        data=words(weight.data),
        zeros=None if weight.zeros is None else weight.zeros.astype(jnp.uint16),
        arrangement=Arrangement.FRAGMENTS,
    )
