"""Arithmetic whose result does not depend on the program that it is compiled into.

Compilers fuse a product into the sum behind it, skip roundings between two fused operations, and
choose the order of a sum by the number of rows. The functions here fix all three, so that a row of
a batch has the same bits in training and in serving, whatever is computed beside it.

Dims: M row, R row of a tile, D width.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

TILE_ROWS = 32


def pinned(product: jax.Array) -> jax.Array:
    """Returns a product unchanged; a sum that reads it cannot become a fused multiply-add."""
    return jnp.where(product == product, product, jnp.asarray(jnp.nan, product.dtype))


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts x to a float dtype with a rounding that no compiler leaves out."""
    if dtype.itemsize >= x.dtype.itemsize:
        return x.astype(dtype)
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def by_tiles(compute: Callable[[jax.Array], jax.Array], x_MD: jax.Array) -> jax.Array:
    """Applies a function of rows to tiles of 32 rows, the last one padded with zeros.

    All tiles are computations of one shape, which nothing around them is fused with. So a row has
    the same bits however many there are, if its place in a tile does not matter.
    """
    num_rows = x_MD.shape[0]
    num_tiles = -(-num_rows // TILE_ROWS)
    x_MD = jnp.pad(x_MD, ((0, num_tiles * TILE_ROWS - num_rows), (0, 0)))

    def tile(x_RD: jax.Array) -> jax.Array:
        # Barriers, as a loop of one step would be no loop.
        return jax.lax.optimization_barrier(compute(jax.lax.optimization_barrier(x_RD)))

    tiles = x_MD.reshape(num_tiles, TILE_ROWS, -1)
    y = tile(tiles[0])[None] if num_tiles == 1 else jax.lax.map(tile, tiles)
    return y.reshape(num_tiles * TILE_ROWS, -1)[:num_rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def ordered_sum(x: jax.Array, num_dims: int = 1) -> jax.Array:
    """Sums over the last dims, kept with size 1, in an order that depends on their sizes only."""
    leading = x.shape[: x.ndim - num_dims]
    rows_MD = x.reshape(math.prod(leading), -1)
    sums_M1 = by_tiles(functools.partial(jnp.sum, axis=1, keepdims=True), rows_MD)
    return sums_M1.reshape(*leading, *(1,) * num_dims)


def _sum_forward(x: jax.Array, num_dims: int) -> tuple[jax.Array, jax.Array]:
    return ordered_sum(x, num_dims), jnp.zeros((0, *x.shape), x.dtype)


def _sum_backward(num_dims: int, like: jax.Array, d_sum: jax.Array) -> tuple[jax.Array]:
    del num_dims
    return (jnp.broadcast_to(d_sum, like.shape[1:]),)


ordered_sum.defvjp(_sum_forward, _sum_backward)


def ordered_mean(x: jax.Array, num_dims: int) -> jax.Array:
    """Computes the mean over the last dims, kept with size 1, in a fixed order."""
    count = math.prod(x.shape[x.ndim - num_dims :])
    return pinned(ordered_sum(x, num_dims) / count)


def ordered_logsumexp(x: jax.Array) -> jax.Array:
    """Computes log(sum(exp(x))) over the last dim, kept with size 1, in a fixed order."""
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return largest + jnp.log(ordered_sum(jnp.exp(x - largest)))


def ordered_softmax(x: jax.Array) -> jax.Array:
    """Computes the softmax over the last dim, summed in a fixed order."""
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    weights = jnp.exp(x - largest)
    return weights / ordered_sum(weights)
