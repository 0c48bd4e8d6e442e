"""Matrices in 8-bit floats with fp32 scales per block: the shapes of blocks and of scales.

    x = values * scale,   where all elements of a block share one scale

A matrix is [R, C]; C is the dim that a matmul contracts. Scales are stored with the blocks of C
first, so that the scales which one step of a matmul reads are contiguous.

| form | shape of the scales | elements that share a scale |
|---|---|---|
| 1x128 | [J, R] | 128 columns of a row |
| 128x128 | [J, I] | 128 rows of 128 columns |

Dims: R row, C column, J blocks of 128 columns, I blocks of 128 rows; the last may be shorter.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .errors import InputError

BLOCK = 128
FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
"""e4m3 for weights and activations: 3 bits of mantissa, to 448. e5m2 for gradients: 2, to 57344."""


class Scaling(enum.StrEnum):
    """Shapes of the blocks of an 8-bit matrix that share one scale."""

    BLOCK_OF_ROW = "1x128"
    BLOCK = "128x128"

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape of the fp32 scales of a [rows, columns] matrix."""
        J, I = -(-columns // BLOCK), -(-rows // BLOCK)  # noqa: E741
        return (J, rows) if self is Scaling.BLOCK_OF_ROW else (J, I)


class Quantized(NamedTuple):
    """A matrix in 8-bit floats with its fp32 scales; ``dequantized`` gives its numbers."""

    values: jax.Array  # e4m3 or e5m2 [R, C]
    scale: jax.Array  # float32, of a shape above


def scaling_of(name: str, values: jax.Array, scale: jax.Array) -> Scaling:
    """Returns which elements share a scale in an 8-bit matrix, from the shape of its scales.

    For a matrix of one row both forms have the same scales, so the result does not matter.

    Args:
        name: the matrix's name in error messages.

    Raises:
        InputError: not an 8-bit matrix, or scales of no form.
    """
    if values.ndim != 2 or values.dtype not in FORMATS:
        raise InputError(
            f"{name} is {values.dtype}{list(values.shape)}; it must be a matrix of float8_e4m3fn "
            "or float8_e5m2, its last dim contracted: make it by quantize"
        )
    shapes = {form: form.shape(*values.shape) for form in Scaling}
    found = next((form for form, shape in shapes.items() if shape == scale.shape), None)
    if found is None or scale.dtype != jnp.float32:
        forms = ", ".join(f"{list(shape)} ({form})" for form, shape in shapes.items())
        raise InputError(
            f"{name}_scale is {scale.dtype}{list(scale.shape)}; scales of {name}, "
            f"{list(values.shape)}, are float32 of one of these shapes: {forms}"
        )
    return found


def dequantized(
    values: jax.Array, scale: jax.Array, *, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Computes ``values * scale`` in ``dtype``: exact in float64, rounded once in float32."""
    form = scaling_of("values", values, scale)
    return values.astype(dtype) * spread(form, scale, *values.shape).astype(dtype)


def spread(form: Scaling, scale: jax.Array, rows: int, columns: int) -> jax.Array:
    """Returns each element's scale, as [R, C] or a shape that broadcasts to it.

    Scales of several matrices have leading dims, which the result keeps in front.
    """
    each = jnp.repeat(jnp.swapaxes(scale, -1, -2), BLOCK, axis=-1)[..., :columns]
    if form is Scaling.BLOCK_OF_ROW:
        return each
    return jnp.repeat(each, BLOCK, axis=-2)[..., :rows, :]
