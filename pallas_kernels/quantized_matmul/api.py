"""The public function: validates and chooses who computes. Dims: M row, K contracted, N column."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import announce
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.errors import InputError, UnsupportedError

from .choice import MOST_ROWS_MEASURED, measured_config, takes_kernel
from .config import MOST_ROWS, ProductShape
from .hopper import quantized_matmul_hopper, unsupported
from .hopper_dequantize import dequantized_hopper
from .reference import quantized_matmul_reference
from .rounded_inputs import product_of_rounded
from .weight import QuantizedWeight
from .xla import input_gradient, quantized_matmul_xla

type QuantizedImplementation = Literal["auto", "hopper", "xla", "reference"]
MOST_BYTES = 256 * 2**20
"""Of a dequantized weight in memory at a time."""


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: Any = None,
    implementation: QuantizedImplementation = "auto",
    most_bytes: int | None = MOST_BYTES,
) -> jax.Array:
    """``x w`` of a weight that is kept in 4 or 8 bits.

    The weight is dequantized to x's dtype; products are summed in fp32 and rounded once. Where the
    format rounds activations, each row of x is brought to 8 bits by its own largest element, and
    8-bit numbers are multiplied as the bfloat16 that they are too: sums in fp32 (of int8 by XLA in
    int32). The gradient of x dequantizes
    again; the weight is a constant. A product that rounds activations has no gradient.

    Args:
        x: [M, K], bfloat16, float16 or float32.
        weight: a matrix [K, N], without dims in front.
        out_dtype: of the result; x's by default.
        implementation: "hopper" (Mosaic GPU; rows of bfloat16 or float16 and a weight that
            ``arranged`` gave; of more than 256 rows the kernel only dequantizes), "xla", or
            "reference", which dequantizes the whole weight; "auto" takes hopper for an arranged
            weight on a device where the kernel was measured (``tuned``; beyond 64 rows it only
            dequantizes there), else xla.
        most_bytes: of the dequantized weight at a time. None: the whole, as on a mesh, whose
            devices have parts of it.

    Raises:
        InputError: shapes or dtypes that disagree, or an unknown implementation.
        UnsupportedError: the kernel is named and cannot compute this call; a gradient through
            rounded activations, or the reference with those.

    Examples:
        >>> from pallas_kernels.quantized_matmul import WeightCode, WeightFormat, round_weight
        >>> weight = round_weight(jnp.ones((64, 32)), WeightFormat(code=WeightCode.INT8))
        >>> pallas_kernels.quantized_matmul(jnp.ones((1, 64)), weight).shape
        (1, 32)
    """
    x = jnp.asarray(x)
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
    if implementation not in ("auto", "hopper", "xla", "reference"):
        raise InputError(
            f"implementation={implementation!r} must be auto, hopper, xla or reference"
        )
    if weight.format.activations is not None and implementation == "reference":
        raise UnsupportedError(
            f"implementation='reference' multiplies dequantized weights, and {weight.format.name} "
            "rounds inputs; implementation='xla' can"
        )
    weight.check()
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    reason = "not asked for"
    if implementation in ("auto", "hopper"):
        reason = unsupported(x, weight, out)
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot multiply {list(x.shape)} with a weight in "
            f"{weight.format.name}: {reason}; xla can"
        )
    is_few = x.shape[0] <= MOST_ROWS
    config = None
    if implementation == "auto":
        if reason is None and x.shape[0] <= MOST_ROWS_MEASURED:
            config = measured_config(ProductShape.of(x.shape[0], weight))
        announce(
            "quantized_matmul",
            "xla" if config is None else "hopper",
            f"{x.dtype}{list(x.shape)} times {weight.format.name}{[rows, columns]}",
            because=None if reason is None else f"not hopper: {reason}",
        )
    dequantizes = reason is None and takes_kernel(weight)
    transposed = dequantized_hopper if dequantizes or implementation == "hopper" else None

    def multiplied(x: jax.Array, weight: QuantizedWeight, out: jnp.dtype) -> jax.Array:
        if (implementation == "hopper" and is_few) or config is not None:
            return quantized_matmul_hopper(x, weight, out_dtype=out, config=config)
        return quantized_matmul_xla(
            x, weight, out_dtype=out, most_bytes=most_bytes, transposed=transposed
        )

    @jax.custom_vjp
    def product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        if implementation == "reference":
            return quantized_matmul_reference(x, weight, out_dtype=out)
        if weight.format.activations is None:
            return multiplied(x, weight.plain, out)
        in_float32 = functools.partial(multiplied, out=ACCUMULATOR)
        return product_of_rounded(x, weight.plain, in_float32, out_dtype=out)

    def forward(x: jax.Array, weight: QuantizedWeight):
        if weight.format.activations is not None:
            raise UnsupportedError(
                f"a product with a weight in {weight.format.name} has no gradient: rounding has "
                "none; keep activations as they are (activations=None) to train adapters"
            )
        return product(x, weight), weight

    def backward(weight: QuantizedWeight, cotangent: jax.Array):
        cotangent = cotangent.astype(x.dtype)
        return input_gradient(cotangent, weight.plain, out_dtype=x.dtype), None

    product.defvjp(forward, backward)
    return product(x, weight)
