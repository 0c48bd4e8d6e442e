"""Arithmetic on one score tile in registers, written per strip of 8 columns.

A warpgroup holds a tile in the WGMMA layout: of each strip a thread owns two columns of two rows.
Whole strips are sliced, added and concatenated without moving a value between threads.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
STRIP = 8
ROUND_SHIFT = 1.5 * 2.0**23


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
    """The strips of 8 columns."""
    rows, cols = x.shape
    return [lax.slice(x, (0, i), (rows, i + STRIP)) for i in range(0, cols, STRIP)]


def sum_strips(x: jax.Array) -> jax.Array:
    """Adds the strips: a row sum up to the last 8 columns, with no exchange between threads."""
    return _tree(jnp.add, strips(x))


def max_strips(x: jax.Array) -> jax.Array:
    """The strips' maximum: a row maximum up to the last 8 columns."""
    return _tree(jnp.maximum, strips(x))


def _tree(combine: Callable[..., jax.Array], parts: list[jax.Array]) -> jax.Array:
    while len(parts) > 1:
        odd = parts[len(parts) & ~1 :]
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def exp2_tile(x: jax.Array, *, num_polynomial: int) -> jax.Array:
    """``2**x`` for x <= 126; the first strips by a cubic on the multiply-add units.

    The special function unit gives 16 exponentials a cycle and multiprocessor, less than a tile of
    64-wide heads needs. The cubic's relative error is 8e-5, under the 2e-3 of the bf16 it ends in.
    """
    parts = strips(x)
    first = [_exp2_cubic(part) for part in parts[:num_polynomial]]
    if num_polynomial == 0:
        return jnp.exp2(x)
    rest = lax.slice(x, (0, num_polynomial * STRIP), x.shape)
    return jnp.concatenate([*first, jnp.exp2(rest)], axis=1)


def _exp2_cubic(x: jax.Array) -> jax.Array:
    x = jnp.maximum(x, -126.0)
    shifted = x + ROUND_SHIFT  # the integer nearest to x is now in the low bits
    fraction = x - (shifted - ROUND_SHIFT)
    y = ((0.05517141 * fraction + 0.24261075) * fraction + 0.69326099) * fraction + 0.9999281
    exponent = lax.shift_left(lax.bitcast_convert_type(shifted, jnp.int32), 23)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32) + exponent, jnp.float32)


def soft_cap(s: jax.Array, scale: float, cap: float) -> jax.Array:
    """``cap * tanh(scale * s / cap)``, by ex2: the hardware's tanh is good to 2**-11 only."""
    return cap - (2.0 * cap) / (jnp.exp2(s * (2.0 * LOG2E * scale / cap)) + 1.0)
