"""Matmuls with 4-bit and 8-bit weights, for any number of rows, with a gradient of x.

Formats that round activations quantize each row of x to 8 bits, scaled by its largest element. A
transposed weight in e4m3 is multiplied by the tensor cores in 8 bits (``rounded``). Values of int8
are exact in bfloat16, so they are multiplied exactly by the same 16-bit kernels as other quantized
weights.

Dims: M row of x, K contracted, N column.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.quantized_weight import (
    Arrangement,
    QuantizedWeight,
    WeightCode,
    dequantized_rows,
)
from pallas_kernels.quantized_weight.hopper_dequantize import dequantized_hopper
from pallas_kernels.quantized_weight.weight import weight_scales

from .choice import MOST_ROWS_MEASURED, product_config, takes_kernel
from .config import MOST_ROWS, ProductShape
from .hopper import product_hopper, unsupported_product
from .reference import FewRowsCall
from .rounded import rounded_product, rounded_rows
from .xla import input_gradient, quantized_matmul_xla

type QuantizedImplementation = Literal["auto", "hopper", "xla"]
type CodeProduct = Callable[[jax.Array, QuantizedWeight], jax.Array]
"""Function that multiplies bfloat16 rows by a quantized weight, to float32."""

MOST_BYTES = 256 * 2**20
"""Most bytes of a dequantized weight in memory at a time."""


def _require_product(x: jax.Array, weight: QuantizedWeight, implementation: str) -> None:
    """Raises InputError for shapes or dtypes that disagree, or an unknown implementation."""
    rows, columns = weight.matrix_shape
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise InputError(
            f"x is {x.dtype}{list(x.shape)}; it must be a matrix of bfloat16, float16 or float32"
        )
    if weight.leading or x.shape[1] != rows:
        raise InputError(
            f"x is {list(x.shape)} and the weight {list(weight.shape)}, {rows} x {columns} as a "
            "matrix; x has as many columns as that has rows, and one layer is multiplied at a time"
        )
    if implementation not in ("auto", "hopper", "xla"):
        raise InputError(f"implementation={implementation!r} must be auto, hopper or xla")
    weight.check()


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: Any = None,
    implementation: QuantizedImplementation = "auto",
    most_bytes: int | None = MOST_BYTES,
) -> jax.Array:
    """Computes the matrix product ``x w`` with a weight quantized to 4 or 8 bits.

    The weight is dequantized to x's dtype; products are summed in fp32 and rounded once. Where the
    format rounds activations, each row of x is quantized to 8 bits, scaled by its largest element;
    the 8-bit values are multiplied as bfloat16 and summed in fp32 (int8 by XLA in int32). A
    transposed weight is multiplied in e4m3; with more than 64 rows, sums have 14 bits. The
    gradient of x dequantizes again; the weight gets none. A product that rounds activations has no
    gradient.

    Args:
        x: [M, K], bfloat16, float16 or float32.
        weight: a matrix [K, N] without leading dims.
        out_dtype: dtype of the result; x's by default.
        implementation: "hopper" (Mosaic GPU; x in bfloat16 or float16 and a weight from
            ``arranged``; with more than 256 rows the kernel only dequantizes) or "xla". "auto"
            takes "hopper" for an arranged weight on a device with measurements (``tuned``; from 65
            rows on it only dequantizes), else "xla".
        most_bytes: most bytes of the weight that XLA dequantizes at a time; None dequantizes it
            whole, as for a sharded weight.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call, or a gradient through
            rounded activations.

    Examples:
        >>> from pallas_kernels.quantized_weight import WeightCode, WeightFormat, round_weight
        >>> weight = round_weight(jnp.ones((64, 32)), WeightFormat(code=WeightCode.INT8))
        >>> pallas_kernels.quantized_matmul(jnp.ones((1, 64)), weight).shape
        (1, 32)
    """
    x = jnp.asarray(x)
    _require_product(x, weight, implementation)
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if weight.arrangement is Arrangement.TRANSPOSED:
        call = FewRowsCall(x=x, weight=weight)
        rounded = rounded_product(call, out_dtype=out, implementation=implementation)
        return without_gradient(rounded, _why_no_gradient(weight))
    reason = "not asked for"
    if implementation in ("auto", "hopper"):
        reason = unsupported_product(FewRowsCall(x=x, weight=weight), out)
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot multiply {list(x.shape)} with a weight in "
            f"{weight.format.name}: {reason}; xla can"
        )
    is_few = x.shape[0] <= MOST_ROWS
    config = None
    if implementation == "auto":
        if reason is None and x.shape[0] <= MOST_ROWS_MEASURED:
            config = product_config(ProductShape.of(x.shape[0], weight))
        announce(
            "quantized_matmul",
            "xla" if config is None else "hopper",
            f"{x.dtype}{list(x.shape)} times {weight.format.name}{list(weight.matrix_shape)}",
            because=None if reason is None else f"not hopper: {reason}",
        )
    dequantizes = reason is None and takes_kernel(weight)
    transposed = dequantized_hopper if dequantizes or implementation == "hopper" else None

    def multiplied(x: jax.Array, weight: QuantizedWeight, out: jnp.dtype) -> jax.Array:
        if (implementation == "hopper" and is_few) or config is not None:
            return product_hopper(x, weight, config, out_dtype=out)
        return quantized_matmul_xla(
            x, weight, out_dtype=out, most_bytes=most_bytes, transposed=transposed
        )

    @jax.custom_vjp
    def product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        if weight.format.activations is None:
            return multiplied(x, weight.plain, out)
        in_float32 = functools.partial(multiplied, out=ACCUMULATOR)
        return product_of_rounded(x, weight.plain, in_float32, out_dtype=out)

    def forward(x: jax.Array, weight: QuantizedWeight):
        if weight.format.activations is not None:
            raise UnsupportedError(_why_no_gradient(weight))
        return product(x, weight), weight

    def backward(weight: QuantizedWeight, cotangent: jax.Array):
        cotangent = cotangent.astype(x.dtype)
        return input_gradient(cotangent, weight.plain, out_dtype=x.dtype), None

    product.defvjp(forward, backward)
    return product(x, weight)


def _why_no_gradient(weight: QuantizedWeight) -> str:
    return (
        f"a product with a weight in {weight.format.name} has no gradient: rounding has none; keep "
        "activations as they are (activations=None) to train adapters"
    )


def product_of_rounded(
    x_MK: jax.Array, weight: QuantizedWeight, product: CodeProduct, *, out_dtype: jnp.dtype
) -> jax.Array:
    """Multiplies the codes of x and of the weight, and scales the sums: [M, N].

    Int8 codes in rows are summed in int32 by XLA, others in fp32. If scales vary along the
    contracted dim, they cannot be applied to the sum: then both operands are dequantized to fp32.
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
