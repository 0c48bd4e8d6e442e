"""Layouts of tiles in shared memory and registers, and arithmetic on strips of score tiles.

A warpgroup holds a tile in the WGMMA layout: in each strip of 8 columns a thread owns two
columns of two rows. Whole strips are sliced, added and concatenated without moving a value
between threads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir

from .mosaic import arith, mgpu, nvvm, plgpu, scf, vector

LOG2E = math.log2(math.e)
STRIP = 8
ALL_LANES = 0xFFFFFFFF


def tile_layout() -> Any:
    """Returns the layout of a 2D tile in a warpgroup's registers (WGMMA's)."""
    return plgpu.Layout.WGMMA


def row_layout() -> Any:
    """Returns the register layout of an array with one number per row of a WGMMA tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def column_layout() -> Any:
    """Returns the register layout of an array with one number per column of a WGMMA tile."""
    return plgpu.Layout.WGMMA.reduce(0)


def swizzle_bytes(*widths: int, itemsize: int = 2) -> int:
    """Returns the widest shared memory swizzle (bytes) whose atom divides rows of these widths."""
    return next(size for size in (128, 64, 32) if all(w % (size // itemsize) == 0 for w in widths))


def tiled(
    swizzle: int, itemsize: int = 2
) -> "tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]":
    """Returns the tiling and swizzle of a shared memory tile that both WGMMA and TMA accept."""
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
    """Sets a tile to ``fill`` except where ``diag_min <= column - row <= diag_max``.

    Columns from ``num_cols`` and rows from ``num_rows`` on are set to ``fill``, too. Strip i
    compares one bound per row with the constant 8 * i. With whole-tile iotas the compiler would
    keep a register per column across the loop.
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
    """Splits a register tile into strips of 8 columns."""
    rows, cols = x.shape
    return [lax.slice(x, (0, i), (rows, i + STRIP)) for i in range(0, cols, STRIP)]


def sum_strips(x: jax.Array) -> jax.Array:
    """Adds a tile's strips of 8 columns, without shuffles: [rows, 8], still to sum per row."""
    parts = strips(x)
    while len(parts) > 1:
        odd = parts[len(parts) & ~1 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def soft_cap(s: jax.Array, scale: float, cap: float) -> jax.Array:
    """Computes ``cap * tanh(scale * s / cap)`` by ex2, as the hardware's tanh has only 11 bits."""
    return cap - (2.0 * cap) / (jnp.exp2(s * (2.0 * LOG2E * scale / cap)) + 1.0)


def scale_rows_if_needed(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Computes ``x * factor[:, None]``; a warp whose 16 rows all have factor 1 skips it."""

    @plgpu.inline_mgpu(
        arg_types=(tile_layout(), row_layout()),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=tile_layout()),
    )
    def scale(ctx, x, factor):
        del ctx
        branch = scf.IfOp(
            _any_lane_differs_from_one(factor), [r.type for r in x.registers.flat], has_else=True
        )
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.then_block):
            scaled = x * factor.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(x.registers.flat))
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return scale(x, factor)


def _any_lane_differs_from_one(factor: Any) -> Any:
    i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
    one = mgpu.FragmentedArray.splat(
        mgpu.c(1.0, factor.mlir_dtype), factor.shape, factor.layout, is_signed=None
    )
    differs: Any = mgpu.c(0, i1)
    for register in (factor != one).registers.flat:
        differs = arith.ori(differs, _first_element(register))
    lanes: Any = mgpu.c(ALL_LANES, i32)
    return nvvm.vote_sync(lanes, differs, "any")


def _first_element(register: Any) -> Any:
    if not isinstance(register.type, ir.VectorType):
        return register
    position = ir.DenseI64ArrayAttr.get([0])
    return vector.extract(register, dynamic_position=[], static_position=position)
