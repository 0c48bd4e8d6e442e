"""Arithmetic whose result does not depend on the program that it is compiled into.

Compilers fuse a product into the sum behind it, skip roundings between two fused operations, and
choose the order of a sum by the number of rows. The functions here fix all three, so that a row of
a batch has the same bits in training and in serving, whatever is computed beside it.

Dims: M row, R row of a tile, D width.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

TILE_ROWS = 32


@jax.custom_jvp
def pinned(product: jax.Array) -> jax.Array:
    """Returns a product unchanged; a sum that reads it cannot become a fused multiply-add.

    Its gradient passes through, so that nothing is kept for the backward pass.
    """
    return jnp.where(product == product, product, jnp.asarray(jnp.nan, product.dtype))


@pinned.defjvp
def _pinned_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]):
    return pinned(*primals), tangents[0]


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts x to a float dtype with a rounding that no compiler leaves out; gradients are cast."""
    return x.astype(dtype) if dtype.itemsize >= x.dtype.itemsize else _rounded(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


@_rounded.defjvp
def _rounded_jvp(dtype: jnp.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]):
    return _rounded(primals[0], dtype), tangents[0].astype(dtype)


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
