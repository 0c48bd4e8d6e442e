"""How many columns of a row each of its parts has, where no tile divides the row.

Numbers of parts of unequal size are brought together by how many columns each counts. No part tells
another: a count follows from where the part's tiles lie and which of their places are the row's. It
is static, an int, of a tile whose columns all count; else fp32.

Dims: A part in a warpgroup, M column of a tile, P part of a row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .config import Flat, Odd, lane_layout

type Count = int | jax.Array

type Bounds = tuple[Count, Count]
"""The first place in a tile that is the row's, and the one after the last."""


def _same(x: jax.Array, fill: float = 0.0) -> jax.Array:
    del fill
    return x


def _sums(*xs: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jnp.sum(x, axis=1) for x in xs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Which columns of a tile count."""

    columns: Count | None = None  # fp32 [A]; None: all that there are
    own: Callable[..., jax.Array] = _same
    """(x [A, M], fill of 0.0) to x in columns that count, ``fill`` elsewhere."""
    near: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None
    """x [A, M] to the mean of some columns of each part that count, [A] and [A, M], where that is
    sooner known than the mean of all."""
    sums: Callable[..., tuple[jax.Array, ...]] = _sums
    """Some [A, M] to the sum of each over the columns, [A]."""

    def size(self, x: jax.Array) -> Count:
        """Columns of x [A, M] that count; 1 for none."""
        return at_least_one(x.shape[1] if self.columns is None else self.columns)

    def mean(self, x: jax.Array) -> jax.Array:
        """[A, M] to [A]; 0 of no columns."""
        return jnp.sum(self.own(x), axis=1) * (1.0 / self.size(x))


ALL = Counted()


def warps(layout: Any) -> jax.Array:
    """int32 [A]: warps by number, as sums over the columns of a tile in this layout lie."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout.reduce(1))


def members_and_warps(num_parts: int) -> tuple[jax.Array, jax.Array]:
    """int32 [P]: of each part its warpgroup, among all that share a row, and its warp."""
    part_P = plgpu.broadcasted_iota(jnp.int32, (num_parts,), 0, layout=lane_layout(num_parts))
    return lax.div(part_P, WARPS), lax.rem(part_P, WARPS)


def within(begin: Count, size: int, bounds: Bounds) -> jax.Array:
    """How many of ``size`` places from ``begin`` on are within bounds, fp32."""
    first, end = bounds
    some = jnp.minimum(begin + size, end) - jnp.maximum(begin, first)
    return jnp.maximum(some, 0).astype(jnp.float32)


def flat_bounds(c: Flat, columns: int, shift: Count, member: Count, chunk: Count) -> Bounds:
    """Of a chunk of a row that begins at ``shift`` of the places that all chunks cover.

    Args:
        member: of the warpgroups of all blocks that share the row.
    """
    first = shift - (member * c.chunks + chunk) * c.piece
    return first, first + columns


def odd_bounds(
    c: Odd, columns: int, shift: Count, member: Count, i: Count
) -> tuple[jax.Array, Bounds]:
    """Where the i-th tile of a warpgroup begins in the row's window, and its bounds: what the tile
    before has counts there.
    """
    wanted = (i * c.warpgroups + member) * c.columns
    end = shift + columns
    window = lax.div(end + c.vector - 1, c.vector) * c.vector
    start = jnp.minimum(wanted, window - c.columns)
    return start, (jnp.maximum(wanted, shift) - start, end - start)


def of_tiles(tile: int, whole: Sequence[bool], count: Callable[[int], jax.Array]) -> jax.Array:
    """Columns of all of a part's tiles, fp32.

    Args:
        whole: of each tile, whether all columns count, of any part; not of all tiles.
        count: fp32, of a tile by its number.
    """
    cut = [k for k, all_count in enumerate(whole) if not all_count]
    return functools.reduce(jnp.add, map(count, cut)) + float(tile * (len(whole) - len(cut)))


def share(columns: Count, seen: Count) -> float | jax.Array:
    """``columns / (seen + columns)``; 0 of none."""
    return columns / at_least_one(seen + columns)


def at_least_one(count: Count) -> Count:
    """1 for 0, by which something may be divided."""
    return max(count, 1) if isinstance(count, int) else jnp.maximum(count, 1.0)
