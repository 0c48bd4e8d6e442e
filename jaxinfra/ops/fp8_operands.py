"""Operands of matmuls in 8 bits: how they are quantized, in which direction, and what that lost.

On one device a matrix of tokens is [M, K] and the kernels of ``pallas_kernels.quantize`` round it.
On a mesh it keeps the dims that devices share out, [B, T, K], and XLA rounds it by the same formula
to the same bits. Blocks of tokens are 128 of one sequence.

Dims: B sequence, T token, M token of all sequences, K contracted, N column of the result.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfra.config.precision import Fp8Scaling
from jaxinfra.core.axes import Dims
from jaxinfra.numerics.recipe import Fp8Recipe
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.quantize import quantize
from pallas_kernels.quantize.formula import largest_of, magnitude, scale_and_inverse
from pallas_kernels.quantize.xla import quantize_across_xla, quantize_xla

SAMPLED_ROWS = 256
"""On one device: tokens whose lost elements are counted. On a mesh it is all of them."""
BEYOND_ROUNDING = 1.0625
"""Times the largest number of a format: what exceeds it has saturated, not been rounded."""
X, WEIGHT, COTANGENT = range(3)
OPERANDS = ("x", "weight", "cotangent")
"""Rows of a matmul's history."""
NUM_LOST = 2
"""Last columns of a history: shares of elements that became 0, and that saturated or were not
finite."""

_FORMS = {
    Fp8Scaling.TENSOR: Scaling.TENSOR,
    Fp8Scaling.DELAYED: Scaling.TENSOR,
    Fp8Scaling.ROW: Scaling.ROW,
    Fp8Scaling.BLOCKS: Scaling.BLOCK_OF_ROW,
    Fp8Scaling.SQUARES: Scaling.BLOCK,
}


type GatherQuantized = Callable[[jax.Array, jax.Array, Dims], tuple[jax.Array, jax.Array]]
"""8-bit values and scales of a weight, and its dims, to those that all devices multiply with."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Over what a matmul is spread, and how quantized weights come together there."""

    num: int = 1
    gather: GatherQuantized | None = None


ONE_DEVICE = Devices()


class BothWays(NamedTuple):
    """A matrix of tokens, quantized for both products that it enters, each contracting its last
    dim.
    """

    rows: Quantized  # [M, K], or [B, T, K]
    tokens: Quantized  # [K, M], or [B, K, T]


class Input(NamedTuple):
    """What several projections multiply with, quantized once."""

    x: jax.Array  # as the layer made it; cotangents go back to it
    quantized: BothWays
    seen: jax.Array  # fp32 [3]: as ``seen``


def form_of(fp8: Fp8Recipe) -> Scaling:
    """How tokens' scales lie."""
    return _FORMS[fp8.scaling]


def weight_form_of(fp8: Fp8Recipe) -> Scaling:
    """How a weight's scales lie."""
    return Scaling.BLOCK if _FORMS[fp8.scaling].by_blocks else _FORMS[fp8.scaling]


def empty_history(fp8: Fp8Recipe) -> jax.Array:
    """The history of a matmul before the first step: fp32 [3, steps + 2], the last step first."""
    return jnp.zeros((len(OPERANDS), fp8.history + NUM_LOST), ACCUMULATOR)


def next_history(history: jax.Array, emitted: jax.Array) -> jax.Array:
    """The history after a step.

    Args:
        emitted: of the same shape; ``seen`` of each operand in its first and last columns.
    """
    steps = history.shape[-1] - NUM_LOST
    return jnp.concatenate([emitted[:, :1], history[:, : steps - 1], emitted[:, steps:]], axis=-1)


def emitted(history: jax.Array, rows: list[jax.Array]) -> jax.Array:
    """The cotangent by which a history leaves the backward pass: ``seen`` of each operand."""
    each = jnp.stack(rows)
    unused = jnp.zeros((len(rows), history.shape[-1] - each.shape[-1]), each.dtype)
    return jnp.concatenate([each[:, :1], unused, each[:, 1:]], axis=-1)


def delayed_scale(
    fp8: Fp8Recipe, history: jax.Array | None, operand: int, x: jax.Array, dtype: jnp.dtype
) -> jax.Array | None:
    """The scale that earlier steps give an operand; x's own where there were none. None where the
    recipe does not look back.
    """
    if fp8.scaling is not Fp8Scaling.DELAYED:
        return None
    assert history is not None, "delayed scaling needs its history"
    before = jnp.max(history[operand, : fp8.history])
    largest = jnp.where(before > 0.0, before, jnp.max(magnitude(x.astype(ACCUMULATOR))))
    return scale_and_inverse(largest, dtype, power_of_two=fp8.power_of_two)[0]


def both_ways(
    x: jax.Array,
    fp8: Fp8Recipe,
    *,
    dtype: jnp.dtype,
    scale: jax.Array | None,
    devices: Devices,
) -> BothWays:
    """Tokens quantized along their width, and along one another.

    Args:
        x: [M, K] or [B, T, K].
        scale: of the tensor, where it is known before.
    """
    form = form_of(fp8)
    if x.ndim == 2:
        # One array for what rounds it, by rows and across: XLA would compute it again for each.
        x = jax.lax.optimization_barrier(x)
    rows = _cast(x, form, fp8, dtype=dtype, scale=scale, devices=devices)
    if form is Scaling.TENSOR:
        return BothWays(rows, Quantized(jnp.swapaxes(rows.values, -1, -2), rows.scale))
    if form is Scaling.BLOCK:
        return BothWays(rows, Quantized(*(jnp.swapaxes(each, -1, -2) for each in rows)))
    if form is Scaling.BLOCK_OF_ROW:
        tokens = quantize_across_xla(x, dtype=dtype, power_of_two=fp8.power_of_two)
        return BothWays(rows, tokens)
    across, largest = jnp.swapaxes(x, -1, -2), None
    if x.ndim > 2:
        # One scale of all sequences: their products are summed.
        size = magnitude(across.astype(ACCUMULATOR))
        largest = jnp.max(size, axis=(*range(x.ndim - 2), x.ndim - 1))
    tokens = _cast(across, form, fp8, dtype=dtype, scale=None, devices=devices, largest=largest)
    return BothWays(rows, tokens)


def quantized_weight(
    weight_RC: jax.Array,
    fp8: Fp8Recipe,
    *,
    by_columns: bool,
    scale: jax.Array | None,
    devices: Devices,
) -> Quantized:
    """A weight as it is stored, with the scales of a product that contracts its last dim or, by
    columns, its first: of blocks and of a tensor they are the same.

    Returns:
        Values [R, C]; scales of rows are those of columns where these are multiplied.
    """
    form = weight_form_of(fp8)
    if form is Scaling.ROW and by_columns:
        across = _cast(weight_RC.T, form, fp8, dtype=fp8.forward, scale=None, devices=devices)
        return Quantized(across.values.T, across.scale)
    return _cast(weight_RC, form, fp8, dtype=fp8.forward, scale=scale, devices=devices)


def across(weight: Quantized, fp8: Fp8Recipe) -> Quantized:
    """The transpose of a weight that was quantized by columns."""
    scale = weight.scale.T if weight_form_of(fp8) is Scaling.BLOCK else weight.scale
    return Quantized(weight.values.T, scale)


def _cast(
    x: jax.Array,
    form: Scaling,
    fp8: Fp8Recipe,
    *,
    dtype: jnp.dtype,
    scale: jax.Array | None,
    devices: Devices,
    largest: jax.Array | None = None,
) -> Quantized:
    own = fp8.power_of_two and scale is None
    if x.ndim == 2 and largest is None:
        return quantize(
            x, form, dtype=dtype, power_of_two=own, scale=scale, num_devices=devices.num
        )
    return quantize_xla(x, form, dtype=dtype, power_of_two=own, scale=scale, largest=largest)


def seen(x: jax.Array, quantized: Quantized, form: Scaling, *, devices: Devices) -> jax.Array:
    """fp32 [3]: x's largest element, and the shares of its elements that became 0 without being it,
    and that saturated or were not finite.

    The largest element is the one that the scales tell, except where a scale was given.
    """
    values, scale = quantized
    top = largest_of(values.dtype)
    if form is Scaling.TENSOR:
        largest = jnp.max(magnitude(x.astype(ACCUMULATOR)))
    else:
        largest = jnp.max(scale) * top
    stride = max(1, x.shape[0] // SAMPLED_ROWS) if devices.num == 1 and x.ndim == 2 else 1
    x, values = x[::stride].astype(ACCUMULATOR), values[::stride].astype(ACCUMULATOR)
    vanished = (values == 0.0) & (x != 0.0)
    lost = jnp.isnan(values)
    if form is Scaling.TENSOR:
        lost |= jnp.abs(x) > BEYOND_ROUNDING * top * scale
    return jnp.stack([largest, *(jnp.mean(each.astype(ACCUMULATOR)) for each in (vanished, lost))])


def in_blocks(x: jax.Array) -> bool:
    """Whether 128 tokens of the memory's order are always of one sequence: x may be flattened."""
    return x.shape[-2] % BLOCK == 0
