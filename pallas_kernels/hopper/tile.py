"""Layouts of tiles in shared memory and registers, and arithmetic on tiles of scores by strips.

A warpgroup holds a tile in the WGMMA layout: of each strip of 8 columns a thread owns two of
two rows. Whole strips are sliced, added and concatenated without moving a value between threads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .mosaic import plgpu

LOG2E = math.log2(math.e)
STRIP = 8


def tile_layout() -> Any:
    """Layout of a tile in registers."""
    return plgpu.Layout.WGMMA


def row_layout() -> Any:
    """Layout of a number for each row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def column_layout() -> Any:
    """Layout of a number for each column of a tile."""
    return plgpu.Layout.WGMMA.reduce(0)


def swizzle_bytes(*widths: int, itemsize: int = 2) -> int:
    """The widest swizzle whose atom divides rows of these many elements."""
    return next(size for size in (128, 64, 32) if all(w % (size // itemsize) == 0 for w in widths))


def tiled(
    swizzle: int, itemsize: int = 2
) -> "tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]":
    """Transforms of a shared memory tile that WGMMA and TMA both understand."""
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _iota(rows: int, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows, STRIP), axis, layout=tile_layout())


def mask_tile(
    x: jax.Array,
    *,
    fill: float,
    diag_max: jax.Array | None = None,
    diag_min: jax.Array | None = None,
    num_cols: jax.Array | None = None,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """Keeps ``diag_min <= column - row <= diag_max``, ``column < num_cols``, ``row < num_rows``.

    A bound is kept once, for the first strip, and strip i compares it with the constant 8 * i: a
    mask built from whole-tile iotas has the compiler keep a register per column across the loop.
    """
    rows = x.shape[0]
    row, col = _iota(rows, 0), _iota(rows, 1)
    out = []
    for i, strip in enumerate(strips(x)):
        start = i * STRIP
        if diag_max is not None:
            strip = jnp.where(diag_max - (col - row) >= start, strip, fill)
        if diag_min is not None:
            strip = jnp.where(diag_min - (col - row) <= start, strip, fill)
        if num_cols is not None:
            strip = jnp.where(num_cols - col > start, strip, fill)
        if num_rows is not None:
            strip = jnp.where(row < num_rows, strip, fill)
        out.append(strip)
    return jnp.concatenate(out, axis=1)


def strips(x: jax.Array) -> list[jax.Array]:
    """Splits a tile into strips of 8 columns."""
    rows, cols = x.shape
    return [lax.slice(x, (0, i), (rows, i + STRIP)) for i in range(0, cols, STRIP)]


def sum_strips(x: jax.Array) -> jax.Array:
    """Adds the strips: a row sum up to the last 8 columns, with no exchange between threads."""
    parts = strips(x)
    while len(parts) > 1:
        odd = parts[len(parts) & ~1 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def soft_cap(s: jax.Array, scale: float, cap: float) -> jax.Array:
    """Computes ``cap * tanh(scale * s / cap)`` by ex2: tanh of the hardware has only 11 bits."""
    return cap - (2.0 * cap) / (jnp.exp2(s * (2.0 * LOG2E * scale / cap)) + 1.0)
