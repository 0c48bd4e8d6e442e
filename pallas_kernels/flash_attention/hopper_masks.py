"""Masks of one score tile in registers.

A warpgroup holds a tile in strips of 8 columns, and a thread owns the same two columns of each strip.
So a bound is kept once, for the first strip, and strip i compares it with the constant 8 * i: two or
four registers, where a mask built from whole-tile iotas has the compiler keep one register per column.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

STRIP = 8


def _iota(rows: int, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows, STRIP), axis, layout=plgpu.Layout.WGMMA)


def mask_tile(
    x: jax.Array,
    *,
    fill: float,
    diag_max: jax.Array | None = None,
    diag_min: jax.Array | None = None,
    num_cols: jax.Array | None = None,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """Keeps ``diag_min <= column - row <= diag_max``, ``column < num_cols`` and ``row < num_rows``."""
    rows, cols = x.shape
    row, col = _iota(rows, 0), _iota(rows, 1)
    strips = []
    for start in range(0, cols, STRIP):
        strip = lax.slice(x, (0, start), (rows, start + STRIP))
        keeps = []
        if diag_max is not None:
            keeps.append(diag_max - (col - row) >= start)
        if diag_min is not None:
            keeps.append(diag_min - (col - row) <= start)
        if num_cols is not None:
            keeps.append(num_cols - col > start)
        if num_rows is not None:
            keeps.append(row < num_rows)
        for keep in keeps:
            strip = jnp.where(keep, strip, fill)
        strips.append(strip)
    return jnp.concatenate(strips, axis=1)
