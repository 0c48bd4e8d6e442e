"""Matmuls with weights stored in 4 or 8 bits, and compilation for a GPU that is not present."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.recipe import Recipe
from pallas_kernels import UnsupportedError as KernelUnsupported
from pallas_kernels.common.device import H200 as H200
from pallas_kernels.common.device import Facts as Facts
from pallas_kernels.common.device import compiling_for as compiling_for
from pallas_kernels.few_rows_matmul.choice import MOST_ROWS_MEASURED as MOST_ROWS_MEASURED
from pallas_kernels.few_rows_matmul.choice import takes_kernel
from pallas_kernels.few_rows_matmul.quantized import MOST_BYTES
from pallas_kernels.few_rows_matmul.rounded import rounded_rows
from pallas_kernels.quantized_weight import Activations as Activations
from pallas_kernels.quantized_weight import Arrangement, arranged, why_not_arranged
from pallas_kernels.quantized_weight import DoubleQuantizedScales as DoubleQuantizedScales
from pallas_kernels.quantized_weight import QuantizedWeight as QuantizedWeight
from pallas_kernels.quantized_weight import WeightCode as WeightCode
from pallas_kernels.quantized_weight import WeightFormat as WeightFormat
from pallas_kernels.quantized_weight import are_alike as are_alike
from pallas_kernels.quantized_weight import concatenated_columns as concatenated_columns
from pallas_kernels.quantized_weight import double_quantized as double_quantized
from pallas_kernels.quantized_weight import repeated_outputs as repeated_outputs
from pallas_kernels.quantized_weight import round_weight as round_weight


def multiply_quantized(
    spec: str,
    x: Float[Array, "..."],
    weight: QuantizedWeight,
    *,
    recipe: Recipe,
    out: jnp.dtype | None = None,
    is_whole: bool = True,
) -> Float[Array, "..."]:
    """Computes ``einsum(spec, x, weight)`` for a weight quantized to 4 or 8 bits.

    x is cast to ``recipe.compute`` and the weight dequantized to it. The gradient of x is returned
    in x's dtype; the weight has none.

    Args:
        spec: einsum that contracts x's last dims with the weight's first: ``"BTD,DNH->BTNH"``.
        out: dtype of the result; ``recipe.compute`` by default.
        is_whole: whether the weight is whole on one device, where kernels may multiply with it.

    Raises:
        UnsupportedError: another spec, dims that the weight was not quantized along, or a gradient
            where the weight's format rounds activations.
    """
    rank = contracted_dims(spec)
    if rank is None or rank != len(weight.inputs) or weight.leading:
        raise UnsupportedError(
            f"{spec} with a weight {list(weight.shape)} in {weight.format.name}, quantized along "
            f"{list(weight.inputs)}: the last dims of the input must be contracted with those; "
            "multiply with weight.dequantize(dtype)"
        )
    matrix = x.astype(recipe.compute).reshape(-1, weight.matrix_shape[0])
    try:
        product = pallas_kernels.quantized_matmul(
            matrix,
            weight,
            out_dtype=out or recipe.compute,
            most_bytes=MOST_BYTES if is_whole else None,
        )
    except KernelUnsupported as error:
        raise UnsupportedError(str(error)) from error
    return product.reshape(*x.shape[: x.ndim - rank], *weight.outputs)


def as_kernels_read(weight: QuantizedWeight) -> QuantizedWeight:
    """Reorders a weight for this device's kernel.

    The weight is unchanged if no kernel supports it, none was measured to be faster, or it is
    reordered already.
    """
    if weight.arrangement is not Arrangement.ROWS or not _is_reordered(weight):
        return weight
    return _arranged([weight], axis=-1)


def packed_as_kernels_read(weights: Sequence[QuantizedWeight], *, axis: int) -> QuantizedWeight:
    """Concatenates weights of the same input, and reorders the result as ``as_kernels_read`` does.

    Of stacks a layer at a time, so that a packed stack in the order of files is never in memory.

    Args:
        axis: negative index of the output dim along which they are joined.
    """
    joined = functools.partial(concatenated_columns, axis=axis)
    if not _is_reordered(jax.eval_shape(joined, weights)):
        return jax.jit(joined)(weights)
    return _arranged(weights, axis=axis)


def _is_reordered(weight: QuantizedWeight) -> bool:
    return why_not_arranged(weight) is None and takes_kernel(weight)


@functools.partial(jax.jit, static_argnames="axis")
def _arranged(weights: Sequence[QuantizedWeight], *, axis: int) -> QuantizedWeight:
    def of_layer(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        one = len(weights) == 1
        return arranged(weights[0] if one else concatenated_columns(weights, axis=axis))

    # Of a stack one after another: what is between takes several times a weight.
    return jax.lax.map(of_layer, weights) if weights[0].leading else of_layer(weights)


def takes_any_rows(weight: jax.Array | QuantizedWeight) -> bool:
    """Returns whether kernels multiply any number of rows by a weight in its stored order."""
    return isinstance(weight, QuantizedWeight) and weight.arrangement is Arrangement.TRANSPOSED


def kept_for_kernel(weight: QuantizedWeight, kind: str) -> QuantizedWeight | None:
    """Returns a weight's shapes after ``as_kernels_read`` on a kind of device; None if unchanged.

    Args:
        kind: JAX's device_kind.
    """
    with compiling_for(dataclasses.replace(H200, kind=kind)):
        if not _is_reordered(weight):
            return None
        return jax.eval_shape(arranged, weight)


def of_device(weight: QuantizedWeight) -> QuantizedWeight:
    """Corrects ``inputs`` and ``outputs`` of a device's shard of a quantized weight.

    Inside ``shard_map``, a shard's metadata are still those of the whole weight.
    """
    assert weight.arrangement is Arrangement.ROWS, "only one device has another order"
    rows, columns = weight.data.shape[-2:]
    rows = rows * 8 // weight.format.code.bits
    return dataclasses.replace(weight, inputs=(rows,), outputs=(columns,)).check()


def rounded_input(
    x: Float[Array, "..."], activations: Activations, *, contracted: int
) -> Float[Array, "..."]:
    """Rounds x as a matmul with quantized activations would; the result has x's dtype.

    Args:
        contracted: number of x's last dims that the product contracts.
    """
    width = math.prod(x.shape[x.ndim - contracted :])
    values, scale = rounded_rows(x.reshape(-1, width), activations)
    return (values.astype(scale.dtype) * scale).astype(x.dtype).reshape(x.shape)


def contracted_dims(spec: str) -> int | None:
    """Counts the contracted dims if they are x's last and the weight's first; else None."""
    operands, result = spec.split("->")
    x, weight = operands.split(",")
    rank = sum(letter not in result for letter in x)
    fits = rank > 0 and x[-rank:] == weight[:rank] and result == x[:-rank] + weight[rank:]
    return rank if fits else None
