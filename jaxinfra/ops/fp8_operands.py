"""Quantized operands of 8-bit matmuls: dims, placement, and statistics of rounding.

On one device, or inside a ``shard_map``, tokens are a matrix [M, K], which kernels of
``pallas_kernels.fp8`` quantize. If the compiler partitions tokens over a mesh, they keep the
sharded dims, [B, T, K]. XLA then quantizes them by the same formula to the same bits. A block has
128 tokens of one sequence.

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
from jaxinfra.ops.fp8_devices import TOKENS, Devices, ShardingUse
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.fp8 import quantize, quantize_both_ways
from pallas_kernels.fp8.formula import largest_of
from pallas_kernels.fp8.xla import quantize_across_xla, quantize_xla

SAMPLED_ROWS = 256
"""Rows of a device's matrix whose lost elements are counted; all where the compiler spreads it."""
X, WEIGHT, COTANGENT = range(3)
OPERANDS = ("x", "weight", "cotangent")
"""Rows of a matmul's record."""
NUM_LOST = 2
"""Last columns of a record: shares of elements that became 0, and that saturated or were not
finite."""


class BothWays(NamedTuple):
    """A matrix of tokens, quantized for two matmuls: over the width K and over tokens.

    Each matmul contracts the last dim of its array.
    """

    rows: Quantized  # [M, K], or [B, T, K]
    tokens: Quantized  # [K, M], or [B, K, T]


class Input(NamedTuple):
    """An activation that several projections read, quantized once for all of them."""

    x: jax.Array  # before quantization; receives the gradient
    quantized: BothWays
    seen: jax.Array  # fp32 [3]: rounding statistics from ``seen``

    @property
    def is_matrix(self) -> bool:
        """Tells whether tokens of all sequences are rows of one matrix, as on a single device."""
        return self.quantized.rows.values.ndim == 2


def form_of(fp8: Fp8Recipe) -> Scaling:
    """Returns the block shape over which a token's elements share a scale (weights: 128x128)."""
    return Scaling.BLOCK_OF_ROW if fp8.scaling is Fp8Scaling.BLOCKS else Scaling.BLOCK


def empty_record() -> jax.Array:
    """Returns a matmul's initial record: zeros, fp32 [3, 3], for ``seen`` of its 3 operands."""
    return jnp.zeros((len(OPERANDS), 1 + NUM_LOST), ACCUMULATOR)


class Caster(NamedTuple):
    """A quantizer of one operand to 8 bits, which counts elements that became 0 or NaN."""

    operand: int  # X, WEIGHT or COTANGENT
    fp8: Fp8Recipe
    devices: Devices

    @property
    def form(self) -> Scaling:
        """Block shape over which the operand's elements share a scale."""
        return Scaling.BLOCK if self.operand == WEIGHT else form_of(self.fp8)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the operand's 8-bit values."""
        return self.fp8.gradient if self.operand == COTANGENT else self.fp8.forward

    @property
    def format(self) -> dict[str, Any]:
        """Keyword arguments of ``pallas_kernels.quantize`` that give the 8-bit format."""
        return {"dtype": self.dtype, "power_of_two": self.fp8.power_of_two}

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that give the 8-bit format and say where kernels run."""
        return {**self.format, "num_devices": self.devices.num_partitions}

    @property
    def use(self) -> ShardingUse:
        """The way in which the operand is sharded over the mesh."""
        return ShardingUse.STORED if self.operand == WEIGHT else ShardingUse.USED

    def tokens(
        self, x: jax.Array, *, dims: Dims, token_dims: Dims = TOKENS, sequences: int = 1
    ) -> tuple[BothWays, jax.Array]:
        """Quantizes x along the width and along tokens; returns both and x's ``seen`` statistics.

        Args:
            x: [M, K] or [B, T, K].
            dims: logical dims that are merged in K.
            token_dims: logical dims of x's tokens. If they are not ``TOKENS``, the quantized tokens
                are gathered over the devices that shard a sequence.
            sequences: number of sequences in M.
        """
        if x.ndim == 2:
            # One array for what rounds it, by rows and across: XLA would compute it again for each.
            x = jax.lax.optimization_barrier(x)
        form, across = self.form, None
        if form is Scaling.BLOCK and (x.ndim > 2 or token_dims != TOKENS):
            rows = self._by_blocks(x)
        elif x.ndim > 2:
            rows, across = self._by_blocks(x), quantize_across_xla(x, **self.format)
        else:
            rows, across = quantize_both_ways(x, form, **self.options)
        seen = self.seen(x, rows, token_dims + dims)
        join = functools.partial(self.devices.gather_tokens, tokens=token_dims, sequences=sequences)
        # Scales of rows come after the dim of blocks of columns.
        rows = Quantized(join(rows.values, dim=0), join(rows.scale, dim=rows.scale.ndim - 1))
        if across is None:
            return BothWays(rows, Quantized(*(jnp.swapaxes(each, -1, -2) for each in rows))), seen
        across = Quantized(join(across.values, dim=1), join(across.scale, dim=0))
        return BothWays(rows, across), seen

    def weight(self, weight_RC: jax.Array, dims: tuple[Dims, Dims]) -> tuple[Quantized, jax.Array]:
        """Quantizes a weight [R, C] by 128x128 blocks; returns it and its ``seen`` statistics.

        Args:
            dims: logical dims that are merged in R, and in C.
        """
        quantized = self._by_blocks(weight_RC)
        return quantized, self.seen(weight_RC, quantized, dims[0] + dims[1])

    def _by_blocks(self, x: jax.Array) -> Quantized:
        if x.ndim > 2:
            return quantize_xla(x, self.form, **self.format)
        return quantize(x, self.form, **self.options)

    def seen(self, x: jax.Array, quantized: Quantized, dims: Dims) -> jax.Array:
        """Computes the statistics of the function ``seen`` over x's shards on all devices.

        Args:
            dims: logical dims over which x is sharded.
        """
        own = seen(x, quantized, whole=self.devices.num_partitions == 1)
        each = self.devices.stack_shards(own, dims, self.use)
        return jnp.concatenate([jnp.max(each[:, :1], axis=0), jnp.mean(each[:, 1:], axis=0)])


def transposed(weight: Quantized) -> Quantized:
    """Transposes a weight [R, C] of 128x128 blocks to [C, R]."""
    return Quantized(weight.values.T, weight.scale.T)


def seen(x: jax.Array, quantized: Quantized, *, whole: bool) -> jax.Array:
    """Returns statistics of quantizing x, fp32 [3].

    They are the largest absolute value, the fraction of nonzero elements that became 0, and the
    fraction of elements that became NaN.

    Args:
        whole: whether x is on one device; then only a sample of its rows is counted.
    """
    values, scale = quantized
    largest = jnp.max(scale) * largest_of(values.dtype)
    stride = max(1, x.shape[0] // SAMPLED_ROWS) if whole and x.ndim == 2 else 1
    x, values = x[::stride].astype(ACCUMULATOR), values[::stride].astype(ACCUMULATOR)
    vanished = (values == 0.0) & (x != 0.0)
    lost = jnp.isnan(values)
    return jnp.stack([largest, *(jnp.mean(each.astype(ACCUMULATOR)) for each in (vanished, lost))])


def as_matrix(x: jax.Array, contracted: int, devices: Devices) -> jax.Array:
    """Reshapes x to [M, K] on one device, else to [..., T, K].

    Args:
        contracted: number of last dims that become K.
    """
    *lead, _ = x.shape[: x.ndim - contracted + 1]
    x = x.reshape(*lead, math.prod(x.shape[len(lead) :]))
    # Where no block of tokens would be of two sequences.
    flat = devices.num_partitions == 1 and x.shape[-2] % BLOCK == 0
    return x.reshape(-1, x.shape[-1]) if flat or x.ndim < 3 else x
