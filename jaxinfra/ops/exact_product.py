"""Products of activations and weights whose rows have the same bits however many there are.

Libraries choose an order of the sum by the shape of the whole product. Here every row is part of a
tile of a fixed number of rows, and all tiles are products of one shape. Dims that a tensor axis may
shard are cut into four parts, or two if four do not divide them, on one device too. Sums over parts
are added in a binary tree, of which a device has a branch.

Dims: M row, R row of a tile, K width in, N width out, P part of K, C part of a weight.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxinfra.axes import KV_HEADS, MLP, Q_HEADS, VOCAB, Dims
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.exact import by_tiles, rounded
from pallas_kernels.common import device
from pallas_kernels.common.dot import ACCUMULATOR, pinned_einsum

SPLIT_DIMS = frozenset({Q_HEADS, KV_HEADS, MLP, VOCAB})
"""Logical dims of weights that are cut into parts."""
MOST_PARTS = 4
LEAST_WIDTH, WIDTH_MULTIPLE = 128, 64  # of a weight's dims, that the kernels take


def are_kernels() -> bool:
    """Tells whether products are those of Hopper kernels, whose columns have the same bits beside
    other columns.
    """
    return device.target().is_gpu


def ordered_einsum(
    spec: str,
    x: jax.Array,
    weight: jax.Array,
    *,
    out: jnp.dtype,
    dims: Dims | None = None,
    shards: int = 1,
    gather: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Computes ``einsum(spec, x, weight)`` of operands of one dtype, with sums in fp32. For kernels
    the weight may be fp32 beside 16 bits.

    An element depends on its row of x and its column of the weight alone. It has no gradient.

    Args:
        spec: indices that x and the weight share, and the result lacks, are x's last and the
            weight's in any places; those that all three share are x's and the result's first.
        out: dtype of the result.
        dims: logical dims of the weight.
        shards: number of devices that share those of its dims that are cut into parts.
        gather: function that stacks the sums of these devices, if x's last dims are shared.
    """
    operands, out_dims = spec.split("->")
    x_dims, weight_dims = operands.split(",")
    names = dict(zip(weight_dims, dims or (None,) * weight.ndim, strict=True))
    if x_dims[0] in weight_dims and x_dims[0] in out_dims:  # a weight for each
        at = weight_dims.index(x_dims[0])
        letters = weight_dims[:at] + weight_dims[at + 1 :]
        one = functools.partial(
            ordered_einsum, f"{x_dims[1:]},{letters}->{out_dims[1:]}", out=out,
            dims=tuple(names[letter] for letter in letters), shards=shards, gather=gather,
        )  # fmt: skip
        return jax.lax.map(lambda pair: one(*pair), (x, jnp.moveaxis(weight, at, 0)))
    inner = [dim for dim in x_dims if dim not in out_dims]
    rows = [dim for dim in x_dims if dim in out_dims]
    columns = [dim for dim in weight_dims if dim in out_dims]
    assert [*x_dims] == rows + inner, spec
    assert [*out_dims] == rows + columns, spec
    sizes = dict(zip(weight_dims, weight.shape, strict=True))
    row_shape = x.shape[: len(rows)]
    shape = (*row_shape, *(sizes[dim] for dim in columns))
    x_MK = x.reshape(math.prod(row_shape), -1)
    if are_kernels():
        is_transposed = [*weight_dims] == columns + inner
        assert is_transposed or [*weight_dims] == inner + columns, spec
        width = math.prod(sizes[dim] for dim in columns)
        matrix = weight.reshape(width, -1) if is_transposed else weight.reshape(-1, width)
        return _by_kernel(x_MK, matrix, is_transposed=is_transposed, out=out).reshape(shape)
    weight_KN = jnp.einsum(f"{weight_dims}->{''.join(inner + columns)}", weight)
    weight_KN = weight_KN.reshape(x_MK.shape[1], -1)
    depth, width = (
        math.gcd(sizes[each[0]], MOST_PARTS // shards) if names[each[0]] in SPLIT_DIMS else 1
        for each in (inner, columns)
    )
    y_MN = _added(_parts(x_MK, weight_KN, depth, width))
    if gather is not None:
        y_MN = _added(gather(y_MN))
    return rounded(y_MN, out).reshape(shape)


def _by_kernel(
    x_MK: jax.Array, weight: jax.Array, *, is_transposed: bool, out: jnp.dtype
) -> jax.Array:
    """The product by a Hopper kernel; an adapter's rank is filled up with zeros, which add none.

    An fp32 weight, such as a router's, is three addends of x's dtype, one below the other.
    """
    depth, width = weight.shape[::-1] if is_transposed else weight.shape
    more_K, more_N = (max(LEAST_WIDTH - size, 0) for size in (depth, width))
    if weight.dtype.itemsize > x_MK.dtype.itemsize:
        x_MK = jnp.concatenate([x_MK] * 3, axis=1)
        weight = jnp.concatenate(three_parts(weight, x_MK.dtype), axis=1 if is_transposed else 0)
        more_K, more_N = max(LEAST_WIDTH - 3 * depth, 0), more_N or -width % WIDTH_MULTIPLE
    more = ((0, more_N), (0, more_K)) if is_transposed else ((0, more_K), (0, more_N))
    try:
        y_MN = pallas_kernels.ordered_matmul(
            jnp.pad(x_MK, ((0, 0), (0, more_K))),
            jnp.pad(weight, more),
            transposed=is_transposed,
            out_dtype=out,
        )
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(f"numerics=exact: {error}; set numerics=fast") from error
    return y_MN[:, :width]


def three_parts(weight: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    """Returns three arrays of bf16 whose sum is the fp32 weight; in fp16 small ones are lost."""
    found = []
    for _ in range(3):
        found.append(rounded(weight, dtype))
        weight = weight - found[-1].astype(weight.dtype)
    return found


def _parts(x_MK: jax.Array, weight_KN: jax.Array, depth: int, width: int) -> jax.Array:
    """Sums of each part of K, fp32 [P, M, N]; every part of N is a product of its own."""
    weight_CKN = jnp.moveaxis(
        weight_KN.reshape(depth, weight_KN.shape[0] // depth, width, -1), 2, 1
    ).reshape(depth * width, weight_KN.shape[0] // depth, -1)
    weight_CKN = jax.lax.optimization_barrier(weight_CKN)

    def product(x_RK: jax.Array, weight_KN: jax.Array) -> jax.Array:
        operands = jax.lax.optimization_barrier((x_RK, weight_KN))
        y_RN = pinned_einsum("RK,KN->RN", *operands, result=ACCUMULATOR)
        return jax.lax.optimization_barrier(y_RN)

    def tile(x_RK: jax.Array) -> jax.Array:
        if depth * width == 1:
            return product(x_RK, weight_CKN[0])
        x_PRK = jnp.moveaxis(x_RK.reshape(len(x_RK), depth, -1), 1, 0)
        y_CRN = jax.lax.map(
            lambda at: product(x_PRK[at // width], weight_CKN[at]), jnp.arange(depth * width)
        )
        return jnp.moveaxis(y_CRN, 1, 0).reshape(len(x_RK), -1)

    y_MN = by_tiles(tile, x_MK)
    return jnp.moveaxis(y_MN.reshape(len(x_MK), depth, -1), 1, 0)


def _added(sums_PMN: jax.Array) -> jax.Array:
    """Adds sums, a power of two, in a binary tree of neighbours."""
    while len(sums_PMN) > 1:
        sums_PMN = sums_PMN[0::2] + sums_PMN[1::2]
    return sums_PMN[0]
