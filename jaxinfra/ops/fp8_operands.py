"""Operands of matmuls in 8 bits: how they are quantized, in which direction, and what that lost.

Where a device has its tokens, of all sequences or of its share, they are a matrix [M, K] and the
kernels of ``pallas_kernels.fp8`` round it. Where the compiler spreads them over a mesh they
keep the dims that devices share out, [B, T, K], and XLA rounds them by the same formula to the same
bits. Blocks of tokens are 128 of one sequence.

Dims: B sequence, T token, M token of all sequences, K contracted, N column of the result, R row and
C column of a weight.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfra.axes import Dims
from jaxinfra.config.precision import Fp8Scaling
from jaxinfra.numerics.recipe import Fp8Recipe
from jaxinfra.ops.fp8_devices import TOKENS, Devices, Hold
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.fp8 import quantize, quantize_both_ways
from pallas_kernels.fp8.formula import largest_of, magnitude, scale_and_inverse
from pallas_kernels.fp8.xla import quantize_across_xla, quantize_xla

SAMPLED_ROWS = 256
"""Rows of a device's matrix whose lost elements are counted; all where the compiler spreads it."""
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

    @property
    def is_matrix(self) -> bool:
        """Whether tokens of all sequences are rows of one matrix, as where a device has them."""
        return self.quantized.rows.values.ndim == 2


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


class Caster(NamedTuple):
    """What rounds one operand to 8 bits, and counts what that loses."""

    operand: int  # X, WEIGHT or COTANGENT
    fp8: Fp8Recipe
    devices: Devices

    @property
    def form(self) -> Scaling:
        """How its scales lie."""
        return weight_form_of(self.fp8) if self.operand == WEIGHT else form_of(self.fp8)

    @property
    def dtype(self) -> jnp.dtype:
        """Its format."""
        return self.fp8.gradient if self.operand == COTANGENT else self.fp8.forward

    @property
    def format(self) -> dict[str, Any]:
        """As ``pallas_kernels.quantize`` takes it."""
        return {"dtype": self.dtype, "power_of_two": self.fp8.power_of_two}

    @property
    def options(self) -> dict[str, Any]:
        """The same, with what says where kernels run."""
        return {**self.format, "num_devices": self.devices.spread}

    @property
    def held(self) -> Hold:
        """How a mesh holds it."""
        return Hold.STORED if self.operand == WEIGHT else Hold.USED

    def tokens(
        self,
        x: jax.Array,
        history: jax.Array | None,
        *,
        dims: Dims,
        lie: Dims = TOKENS,
        sequences: int = 1,
    ) -> tuple[BothWays, jax.Array]:
        """Tokens along their width, and along one another; and what was ``seen``.

        Args:
            x: [M, K] or [B, T, K].
            dims: logical dims that are merged in K.
            lie: those of x's tokens; the result has ``TOKENS``, brought together in 8 bits.
            sequences: that M has tokens of.
        """
        if x.ndim == 2:
            # One array for what rounds it, by rows and across: XLA would compute it again for each.
            x = jax.lax.optimization_barrier(x)
        form, largest, across = self.form, None, None
        if form is Scaling.TENSOR:
            rows, largest = self._by_tensor(x, history, lie + dims)
        elif form is Scaling.ROW:
            rows = self._by_rows(x, dims)
            across = self._by_rows(jnp.swapaxes(x, -1, -2), lie, sequences=range(x.ndim - 2))
        elif form is Scaling.BLOCK and (x.ndim > 2 or lie != TOKENS):
            rows = self._by_blocks(x)
        elif x.ndim > 2:
            rows, across = self._by_blocks(x), quantize_across_xla(x, **self.format)
        else:
            rows, across = quantize_both_ways(x, form, **self.options)
        seen = self.seen(x, rows, lie + dims, largest)
        join = functools.partial(self.devices.joined, tokens=lie, sequences=sequences)
        if form is not Scaling.TENSOR:  # of rows, after the dim of blocks of columns
            rows = rows._replace(scale=join(rows.scale, dim=rows.scale.ndim - 1))
        rows = rows._replace(values=join(rows.values, dim=0))
        if across is None:
            scale = rows.scale if form is Scaling.TENSOR else jnp.swapaxes(rows.scale, -1, -2)
            return BothWays(rows, Quantized(jnp.swapaxes(rows.values, -1, -2), scale)), seen
        if form is not Scaling.ROW:
            across = across._replace(scale=join(across.scale, dim=0))
        return BothWays(rows, across._replace(values=join(across.values, dim=1))), seen

    def weight(
        self,
        weight_RC: jax.Array,
        history: jax.Array | None,
        dims: tuple[Dims, Dims],
        *,
        by_columns: bool,
    ) -> tuple[Quantized, jax.Array]:
        """A weight as it is stored, with the scales of a product that contracts its last dim or, by
        columns, its first: of blocks and of a tensor they are the same. And what was ``seen``.

        Args:
            dims: logical dims that are merged in R, and in C.

        Returns:
            Values [R, C]; scales of rows are those of columns where these are multiplied.
        """
        rows, columns = dims
        largest = None
        if self.form is Scaling.TENSOR:
            quantized, largest = self._by_tensor(weight_RC, history, rows + columns)
        elif self.form is Scaling.BLOCK:
            quantized = self._by_blocks(weight_RC)
        elif by_columns:
            transposed = self._by_rows(weight_RC.T, rows)
            quantized = Quantized(transposed.values.T, transposed.scale)
        else:
            quantized = self._by_rows(weight_RC, columns)
        return quantized, self.seen(weight_RC, quantized, rows + columns, largest)

    def _by_tensor(
        self, x: jax.Array, history: jax.Array | None, dims: Dims
    ) -> tuple[Quantized, jax.Array]:
        """x by its own largest element, or by that of earlier steps where there were some; and its
        own largest.
        """
        fp8 = self.fp8
        own = self.devices.largest(jnp.max(magnitude(x.astype(ACCUMULATOR))), dims, self.held)
        given = self.format
        if fp8.scaling is not Fp8Scaling.DELAYED:
            return quantize_xla(x, Scaling.TENSOR, largest=own, **given), own
        assert history is not None, "delayed scaling needs its history"
        before = jnp.max(history[self.operand, : fp8.history])
        scale, _ = scale_and_inverse(jnp.where(before > 0.0, before, own), **given)
        given["power_of_two"] = False
        return quantize_xla(x, Scaling.TENSOR, scale=scale, **given), own

    def _by_rows(self, x: jax.Array, dims: Dims, sequences: range = range(0)) -> Quantized:
        """x [..., R, C], each row by its largest element.

        Args:
            dims: logical dims that are merged in C.
            sequences: dims of x in front, whose rows of one number share a scale: their products
                are summed.
        """
        size = magnitude(x.astype(ACCUMULATOR))
        largest = self.devices.largest(
            jnp.max(size, axis=(*sequences, x.ndim - 1)), dims, self.held
        )
        return quantize_xla(x, Scaling.ROW, largest=largest, **self.format)

    def _by_blocks(self, x: jax.Array) -> Quantized:
        if x.ndim > 2:
            return quantize_xla(x, self.form, **self.format)
        return quantize(x, self.form, **self.options)

    def seen(
        self,
        x: jax.Array,
        quantized: Quantized,
        dims: Dims,
        largest: jax.Array | None = None,
    ) -> jax.Array:
        """``seen`` of all shares of x.

        Args:
            dims: logical dims of which this is a share.
            largest: of a tensor with one scale.
        """
        each = self.devices.of_all(
            seen(x, quantized, largest=largest, whole=self.devices.spread == 1), dims, self.held
        )
        return jnp.concatenate([jnp.max(each[:, :1], axis=0), jnp.mean(each[:, 1:], axis=0)])


def across(weight: Quantized, fp8: Fp8Recipe) -> Quantized:
    """The transpose of a weight that was quantized by columns."""
    scale = weight.scale.T if weight_form_of(fp8) is Scaling.BLOCK else weight.scale
    return Quantized(weight.values.T, scale)


def seen(
    x: jax.Array, quantized: Quantized, *, largest: jax.Array | None, whole: bool
) -> jax.Array:
    """fp32 [3]: x's largest element, and the shares of its elements that became 0 without being it,
    and that saturated or were not finite.

    Args:
        largest: of a tensor with one scale; of others the scales tell it.
        whole: x is on one device, and a sample of its rows is counted.
    """
    values, scale = quantized
    top = largest_of(values.dtype)
    stride = max(1, x.shape[0] // SAMPLED_ROWS) if whole and x.ndim == 2 else 1
    x, values = x[::stride].astype(ACCUMULATOR), values[::stride].astype(ACCUMULATOR)
    vanished = (values == 0.0) & (x != 0.0)
    lost = jnp.isnan(values)
    if largest is None:
        largest = jnp.max(scale) * top
    else:
        lost |= jnp.abs(x) > BEYOND_ROUNDING * top * scale
    return jnp.stack([largest, *(jnp.mean(each.astype(ACCUMULATOR)) for each in (vanished, lost))])


def in_blocks(x: jax.Array) -> bool:
    """Whether 128 tokens of the memory's order are always of one sequence: x may be flattened."""
    return x.shape[-2] % BLOCK == 0


def as_matrix(x: jax.Array, contracted: int, devices: Devices, fp8: Fp8Recipe) -> jax.Array:
    """x as [M, K] where a device has it, else [..., T, K].

    Args:
        contracted: number of its last dims, which become K.
    """
    *lead, _ = x.shape[: x.ndim - contracted + 1]
    x = x.reshape(*lead, math.prod(x.shape[len(lead) :]))
    flat = devices.spread == 1 and (not form_of(fp8).by_blocks or in_blocks(x))
    return x.reshape(-1, x.shape[-1]) if flat or x.ndim < 3 else x
