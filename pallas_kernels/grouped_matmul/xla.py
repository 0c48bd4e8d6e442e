"""Grouped products in plain JAX, in blocks of rows of one group, with linear memory.

A loop multiplies each block of rows with its group's weight. It reads and writes whole blocks, in
the order of their rows. Rows that a block writes beyond the end of its group are overwritten by the
next group's block.

Dims: B row of a block, M row, G group, K width in, N width out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.dot import ACCUMULATOR, pinned_einsum
from pallas_kernels.common.varying import vary_alike

from .formulas import SwigluResults, dequantized_operands, swiglu_of

LARGEST_BLOCK, SMALLEST_BLOCK = 128, 8  # rows


class _Blocks(NamedTuple):
    """Blocks of rows, group after group."""

    size: int
    row_ends_G: jax.Array
    block_ends_G: jax.Array

    def find(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the group of block i, its first row, and the rows up to the group's end."""
        group = jnp.searchsorted(self.block_ends_G, i, side="right").astype(jnp.int32)
        previous = jnp.maximum(group - 1, 0)
        first_row = jnp.where(group == 0, 0, self.row_ends_G[previous])
        first_block = jnp.where(group == 0, 0, self.block_ends_G[previous])
        row = first_row + (i - first_block) * self.size
        return group, row, self.row_ends_G[group] - row


def _blocks(num_rows: int, group_sizes_G: jax.Array, size: int | None = None) -> _Blocks:
    if size is None:
        mean = -(-num_rows // group_sizes_G.shape[0])
        size = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (mean - 1).bit_length()))
    return _Blocks(
        size=size,
        row_ends_G=jnp.cumsum(group_sizes_G),
        block_ends_G=jnp.cumsum(-(-group_sizes_G // size)),
    )


def _rows_of(x: jax.Array, rows_M: jax.Array | None, size: int) -> Callable[..., jax.Array]:
    """A function from a first row to ``size`` rows, which may end beyond the last."""
    if rows_M is None:
        padded_MK = jnp.pad(x, ((0, size), (0, 0)))
        return lambda row: lax.dynamic_slice_in_dim(padded_MK, row, size)
    padded_M = jnp.pad(rows_M, (0, size))
    return lambda row: x[lax.dynamic_slice_in_dim(padded_M, row, size)]


def _by_blocks[Results](
    blocks: _Blocks,
    compute: Callable[[jax.Array, jax.Array], Results],
    results: Any,
    operands: tuple[jax.Array | None, ...],
) -> Results:
    """Rows computed block by block, 0 beyond the groups.

    Args:
        blocks: of the rows.
        compute: from a group and a first row to a block of each result.
        results: shapes and dtypes.
        operands: what ``compute`` reads, whose mesh axes the results vary over.
    """

    def step(i: jax.Array, outs: Results) -> Results:
        group, row, _ = blocks.find(i)
        return jax.tree.map(
            lambda out, block: lax.dynamic_update_slice_in_dim(out, block, row, axis=0),
            outs,
            compute(group, row),
        )

    def start(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((shape.shape[0] + blocks.size, shape.shape[1]), shape.dtype)

    def finish(shape: jax.ShapeDtypeStruct, out: jax.Array) -> jax.Array:
        is_in_group_M1 = jnp.arange(shape.shape[0])[:, None] < blocks.row_ends_G[-1]
        return jnp.where(is_in_group_M1, out[: shape.shape[0]], jnp.zeros((), shape.dtype))

    outs = vary_alike((jax.tree.map(start, results), operands, blocks.row_ends_G))[0]
    outs = lax.fori_loop(0, blocks.block_ends_G[-1], step, outs)
    return jax.tree.map(finish, results, outs)


def product(
    x: jax.Array,
    w_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    out_dtype: jnp.dtype,
    block: int | None = None,
) -> jax.Array:
    """Multiplies each row by its group's weight: [M, N], 0 beyond the groups.

    Args:
        x: [M, K], or [T, K] with ``rows_M``.
        w_GKN: of x's dtype.
        group_sizes_G: int32.
        rows_M: int32, rows of x.
        out_dtype: sums are fp32 and rounded to it once.
        block: rows of a block; None: as many as a group has on average. Products of one shape add
            in one order, so with a number a row's bits do not depend on the number of rows.
    """
    num_rows = x.shape[0] if rows_M is None else rows_M.shape[0]
    blocks = _blocks(num_rows, group_sizes_G, block)
    x_of = _rows_of(x, rows_M, blocks.size)

    def compute(group: jax.Array, row: jax.Array) -> jax.Array:
        x_BK, w_KN = x_of(row), w_GKN[group]
        if block is not None:
            x_BK, w_KN = lax.optimization_barrier((x_BK, w_KN))
        return pinned_einsum("BK,KN->BN", x_BK, w_KN, result=out_dtype)

    result = jax.ShapeDtypeStruct((num_rows, w_GKN.shape[2]), out_dtype)
    return _by_blocks(blocks, compute, result, (x, w_GKN, rows_M))


def swiglu(
    x: jax.Array,
    gate_GKN: jax.Array,
    up_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    keep: bool,
    block: int | None = None,
) -> SwigluResults:
    """Computes silu(x gate) * (x up) by groups, and returns both products too if ``keep``.

    Args:
        block: as in ``product``.
    """
    num_rows = x.shape[0] if rows_M is None else rows_M.shape[0]
    blocks = _blocks(num_rows, group_sizes_G, block)
    x_of = _rows_of(x, rows_M, blocks.size)

    def compute(group: jax.Array, row: jax.Array) -> SwigluResults:
        x_BK = x_of(row)
        weights = gate_GKN[group], up_GKN[group]
        if block is not None:
            x_BK, weights = lax.optimization_barrier((x_BK, weights))
        gate_BN, up_BN = (
            pinned_einsum("BK,KN->BN", x_BK, w_KN, result=ACCUMULATOR) for w_KN in weights
        )
        return swiglu_of(gate_BN, up_BN, dtype=x.dtype, keep=keep)

    shape = jax.ShapeDtypeStruct((num_rows, gate_GKN.shape[2]), x.dtype)
    results = SwigluResults(shape, *(shape, shape) if keep else ())
    return _by_blocks(blocks, compute, results, (x, gate_GKN, up_GKN, rows_M))


def scaled_product(
    a_MK: jax.Array,
    b_GNK: jax.Array,
    a_scale_JM: jax.Array,
    b_scale_GJI: jax.Array,
    group_sizes_G: jax.Array,
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Dequantizes 8-bit operands (on a GPU to bf16) and multiplies rows by their group's weight."""
    operands = a_MK, b_GNK, a_scale_JM, b_scale_GJI

    def product(*operands: jax.Array, dtype: jnp.dtype) -> jax.Array:
        a, b = (x.astype(dtype) for x in dequantized_operands(*operands))
        return input_gradient(((a, b),), group_sizes_G, out_dtype=out_dtype)

    return lax.platform_dependent(
        *operands,
        cuda=functools.partial(product, dtype=jnp.dtype("bfloat16")),
        default=functools.partial(product, dtype=ACCUMULATOR),
    )


def input_gradient(
    pairs: tuple[tuple[jax.Array, jax.Array], ...],
    group_sizes_G: jax.Array,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Computes ``d @ w.T`` with each row's group weight w, summed over the pairs: [M, K].

    Args:
        pairs: (d [M, N], w [G, K, N]) of one dtype.
        group_sizes_G: int32.
        out_dtype: dtype of the result; by default that of the pairs.
    """
    (num_rows, _), (_, width, _) = pairs[0][0].shape, pairs[0][1].shape
    dtype = out_dtype or pairs[0][0].dtype
    blocks = _blocks(num_rows, group_sizes_G)
    blocks_of = [(_rows_of(d_MN, None, blocks.size), w_GKN) for d_MN, w_GKN in pairs]

    def compute(group: jax.Array, row: jax.Array) -> jax.Array:
        parts = [
            pinned_einsum("BN,KN->BK", d_of(row), w_GKN[group], result=ACCUMULATOR)
            for d_of, w_GKN in blocks_of
        ]
        return sum(parts[1:], parts[0]).astype(dtype)

    result = jax.ShapeDtypeStruct((num_rows, width), dtype)
    return _by_blocks(blocks, compute, result, tuple(x for pair in pairs for x in pair))


def weight_gradient(
    x: jax.Array,
    d_MN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None,
    *,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Computes x^T d over each group's rows, [G, K, N]: fp32 sums, rounded once; 0 if empty.

    Args:
        x: [M, K], or [T, K] with ``rows_M``.
        d_MN: of x's dtype.
        group_sizes_G: int32.
        rows_M: int32, rows of x.
        out_dtype: dtype of the result.
    """
    blocks = _blocks(d_MN.shape[0], group_sizes_G)
    x_of = _rows_of(x, rows_M, blocks.size)
    d_of = _rows_of(d_MN, None, blocks.size)
    b_B1 = jnp.arange(blocks.size)[:, None]

    def step(i: jax.Array, sums_GKN: jax.Array) -> jax.Array:
        group, row, left = blocks.find(i)
        # Both: a row of another group may be NaN, which a factor of 0 does not silence.
        x_BK, d_BN = (
            jnp.where(b_B1 < left, block, jnp.zeros((), block.dtype))
            for block in (x_of(row), d_of(row))
        )
        sum_KN = sums_GKN[group] + pinned_einsum("BK,BN->KN", x_BK, d_BN, result=ACCUMULATOR)
        return lax.dynamic_update_index_in_dim(sums_GKN, sum_KN, group, axis=0)

    sums_GKN = jnp.zeros((group_sizes_G.shape[0], x.shape[1], d_MN.shape[1]), ACCUMULATOR)
    sums_GKN = vary_alike((sums_GKN, x, d_MN, group_sizes_G, rows_M))[0]
    return lax.fori_loop(0, blocks.block_ends_G[-1], step, sums_GKN).astype(out_dtype)
