"""Which columns of a chunk are a row's, and what the numbers of a chunk or of a row count of them.

In ``flat``, where a row may begin behind the first element of a chunk and end within one.

Dims: A part of a row in a warpgroup or a warp's row, M column of a tile, P part.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .config import tile_layout
from .counts import (
    Bounds,
    Count,
    Counted,
    at_least_one,
    flat_bounds,
    members_and_warps,
    of_tiles,
    warps,
    within,
)
from .flat_interpreted import InterpretedCopies
from .flat_kernel import FlatKernel
from .flat_registers import masked
from .formula import Load, Parts, to_columns, to_parts
from .lanes import first_columns, first_part, sums_of_columns, sums_of_parts


class RowColumns:
    """Of a warpgroup's rows, by their number i.

    Args:
        member: the warpgroup's number among all that share a row.
        row: of the i-th row, or the first warp's, its number.
    """

    def __init__(self, kernel: FlatKernel, member: jax.Array, row: Callable):
        self.k, self.c, self.member, self.row = kernel, kernel.c, member, row
        self.layout = tile_layout(self.c.vector)
        self.shape = (WARPS, self.c.tile)
        # Without these, Pallas sums, and finds layouts of what it has summed.
        self.by_lanes = kernel.f.uneven is not None and not self.c.interpretable

    def column(self, chunk):
        """Where a chunk begins in a row."""
        return (self.member * self.c.chunks + chunk) * self.c.piece

    def own(self, i, chunk, x, fill: float = 0.0):
        """x [A, M] of a chunk in what is the i-th row's, fill elsewhere."""
        if isinstance(self.k.copies, InterpretedCopies):
            return jnp.where(self.counts(i, chunk), x, fill)
        place = {"row": self.row(i), "column": self.column(chunk)}
        sure, vector = self.k.sure(chunk), self.c.vector
        return masked(self.k.copies, x, fill, **place, vector=vector, sure=sure)

    def shift(self, row):
        """Elements of a row's first unit that belong to the row before."""
        return lax.rem(row * self.k.columns, self.k.unit)

    def counts(self, i, chunk):
        """[A, M]: whether an element of a chunk is the row's."""
        warp, at = (
            plgpu.broadcasted_iota(jnp.int32, self.shape, dim, layout=self.layout) for dim in (0, 1)
        )
        row, column = self.row(i), self.column(chunk)
        if self.c.by_warps:
            row = row + warp * self.k.order.period
        else:
            at = warp * self.c.tile + at
        begin = self.shift(row) - column
        return (at >= begin) & (at < begin + self.k.columns)

    def columns_of(self, i, member, warp, chunk):
        """fp32: columns of a warp's part of a chunk that are the i-th row's."""
        return within(warp * self.c.tile, self.c.tile, self.bounds(i, member, chunk))

    def of_warps(self, i, chunk, size: int):
        """fp32 [A]: of the first columns, so many, of each warp's part those that are the row's."""
        warp = 0 if self.c.by_warps else warps(self.layout)
        found = within(warp * self.c.tile, size, self.bounds(i, self.member, chunk))
        return to_parts(found, self.layout)

    def bounds(self, i, member, chunk) -> Bounds:
        """Of the i-th row in a warpgroup's chunk."""
        return flat_bounds(self.c, self.k.columns, self.shift(self.row(i)), member, chunk)

    def is_whole(self, i, chunk):
        """Whether all elements of a chunk are the i-th row's, of this warpgroup."""
        first, end = self.bounds(i, self.member, chunk)
        return (first <= 0) & (end >= self.c.piece)

    def fold(self, inputs: Load, vectors: Load, i, chunk, columns: Count, *, cut: bool):
        """The numbers of a chunk of the i-th row.

        Args:
            columns: of each part those that count.
            cut: whether elements of the chunk may be a neighbor's.
        """
        f, c = self.k.f, self.c
        if f.uneven is None and not cut:
            return f.fold(inputs, vectors)
        own = functools.partial(self.own, i, chunk)
        counted = Counted(columns=columns, own=own) if cut else Counted()
        if not self.by_lanes:
            return f.fold_cut(inputs, vectors, counted)
        first = self.of_warps(i, chunk, c.vector) if cut else c.vector

        def near(x):
            mean_A = first_columns(counted.own(x), vector=c.vector) * (1.0 / at_least_one(first))
            return mean_A, self.to_columns(mean_A)

        sums = functools.partial(sums_of_columns, vector=c.vector)
        counted = dataclasses.replace(counted, near=near, sums=sums)
        return f.fold_cut(inputs, vectors, counted)

    def parts(self, i) -> Parts:
        """Of the i-th row."""
        c = self.c
        if c.by_warps:
            return Parts(whole=True)
        whole, counts = [self.k.whole(k) for k in range(c.chunks)], None
        if self.k.f.uneven is not None and not all(whole):
            places_P = members_and_warps(c.cluster * c.members * WARPS)
            count = functools.partial(self.columns_of, i, *places_P)
            counts = of_tiles(c.tile, whole, count)
        parts = Parts(whole=False, counts=counts)
        if not self.by_lanes:
            return parts
        near = functools.partial(first_part, vector=c.vector)
        sums = functools.partial(sums_of_parts, vector=c.vector)
        return dataclasses.replace(parts, near=near, all_sums=sums)

    def to_columns(self, total):
        """A number of each part or of the row as [A, M]."""
        columns = to_columns(total, self.shape)
        return plgpu.layout_cast(columns, self.layout) if self.by_lanes else columns
