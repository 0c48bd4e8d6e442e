"""Sums of a product's parts over the warpgroups and blocks of a cluster, added in a fixed order.

Every warpgroup stores its sums in its block's shared memory, in one common layout. Then each block
adds the sums of its part of the columns, which it reads from all blocks' shared memory. Nothing
goes through global memory. Sums are added by block rank, then warpgroup, whichever is ready first.

Dims: M row of x, N column of the weight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from .grid import meet_in_cluster
from .machine import WARPGROUP
from .mosaic import arith, mgpu, mgpu_utils, plgpu
from .thread_registers import ThreadRegisters
from .threads import (
    address,
    assembly,
    constant,
    global_number,
    global_place,
    i32,
    packed_pair,
    swiglu,
    thread,
    total,
)

STRIP = 8  # rows of x in a fragment
WIDTH = 64  # columns of a tile: the warps of a warpgroup have a fragment each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSums:
    """Partial sums of a product in registers, added over a cluster's blocks in a fixed order."""

    rows: int
    rows_at_a_time: int  # rows that a block computes in one pass
    columns: int  # of the result
    tiles: int  # weight tiles per block, 64 columns each
    split: int  # blocks per cluster, each with a part of K
    groups: int  # warpgroups per block that have sums of their own
    out_dtype: jnp.dtype
    scale_dtype: jnp.dtype | None = None  # of scales per column; None without scales
    gated: bool = False  # the first half of the tiles are gates: silu(gate) * up is written
    has_residual: bool = False  # a residual of ``out_dtype`` is added to the sums

    @property
    def strips(self) -> int:
        """Number of strips of 8 rows of x that a block computes at a time."""
        return -(-self.rows_at_a_time // STRIP)

    @property
    def width(self) -> int:
        """Number of columns of the result that a cluster computes."""
        return WIDTH * self.tiles // (2 if self.gated else 1)

    @property
    def count(self) -> int:
        """Number of fp32 sums that each thread holds in registers."""
        return self.tiles * self.strips * 4

    @property
    def held(self) -> ThreadRegisters:
        """Form of the array that carries all threads' fp32 sums."""
        return ThreadRegisters(count=self.count, dtype=jnp.dtype(jnp.float32))

    def nothing(self) -> jax.Array:
        """Returns an array of zero sums, to which products are added."""
        return self.held.initial(lambda: [mgpu.c(0.0, ir.F32Type.get())] * self.count)

    def finish(self, sums: jax.Array, gmem, smem, group: jax.Array) -> None:
        """Adds the sums of all blocks and warpgroups and writes this block's result columns."""

        @plgpu.inline_mgpu(arg_types=(self.held.layout, plgpu.RefType()))
        def keep(ctx, sums, ref):
            del ctx
            self.keep(self.held.registers(sums), ref)

        keep(sums, smem.sums.at[group])
        meet_in_cluster(ordered=True)
        refs = [smem.sums, gmem.out]
        refs += [] if self.scale_dtype is None else [gmem.scales]
        refs += [gmem.residual] if self.has_residual else []
        place = (plgpu.Layout.WG_SPLAT(()),) * 3

        @plgpu.inline_mgpu(arg_types=(*place, *[plgpu.RefType()] * len(refs)))
        def add(ctx, column, row, group, *refs):
            del ctx
            sums, out, *rest = refs
            scales = None if self.scale_dtype is None else rest.pop(0)
            column, row, group = (x.registers.flat[0] for x in (column, row, group))
            self.write(column, row, group, sums, out, scales, *rest)

        column = lax.axis_index("columns") * self.width
        row = lax.axis_index("rows") * self.rows_at_a_time
        add(*(jnp.broadcast_to(x, ()) for x in (column, row, group)), *refs)
        meet_in_cluster(ordered=False)

    def keep(self, numbers: list[Any], sums) -> None:
        """Stores a thread's fp32 sums in its warpgroup's buffer in shared memory."""
        place = total(address(sums), (thread(), 4))
        for i, number in enumerate(numbers):
            text = f"st.shared.f32 [$0+{4 * WARPGROUP * i}], $1;"
            assembly(None, [place, number], text, "r,f", pure=False)

    def meet_as_bystander(self) -> None:
        """Arrives at both cluster barriers of ``finish`` for a warpgroup that has no sums."""
        meet_in_cluster(ordered=False)
        meet_in_cluster(ordered=False)

    def write(self, column, row, group, sums, out, scales, residual=None) -> None:
        """Adds and writes this block's columns of the result, two per thread at a time."""
        width = self.width // self.split
        pairs, threads = width // 2 * self.rows_at_a_time, self.groups * WARPGROUP
        rank = arith.index_cast(i32(), mgpu_utils.cluster_idx())
        bases = self.addresses_of_sums(sums)
        for start in range(0, pairs, threads):
            pair = total(thread(), (group, WARPGROUP), constant(start))
            m, n = (f(pair, constant(width // 2)) for f in (arith.divui, arith.remui))
            n = total((n, 2), (rank, width))
            inside = arith.cmpi(arith.CmpIPredicate.ult, pair, constant(pairs))
            there = arith.cmpi(arith.CmpIPredicate.ult, total(m, row), constant(self.rows))
            with mgpu_utils.when(arith.andi(inside, there)):
                found = self.pair_of(bases, m, n)
                at = total(column, n)
                if self.scale_dtype is not None:
                    found = [
                        arith.mulf(x, global_number(scales, at, e, self.scale_dtype))
                        for e, x in enumerate(found)
                    ]
                at = total((total(row, m), self.columns), at)
                if residual is not None:
                    found = [
                        arith.addf(x, global_number(residual, at, e, self.out_dtype))
                        for e, x in enumerate(found)
                    ]
                self.store_pair(out, at, found)

    def pair_of(self, bases: list[Any], m, n) -> list[Any]:
        """Returns the cluster's results (f32) of row m in columns n and n + 1."""
        if not self.gated:
            return [self.cluster_sum(bases, self.offset(m, n), e) for e in range(2)]
        ups = total(n, constant(self.width))
        gate, up = (
            [self.cluster_sum(bases, self.offset(m, x), e) for e in range(2)] for x in (n, ups)
        )
        return [swiglu(*each) for each in zip(gate, up, strict=True)]

    def addresses_of_sums(self, sums) -> list[Any]:
        """Returns the shared memory address of the sums of each block of the cluster."""
        text = "mapa.shared::cluster.u32 $0, $1, $2;"
        return [
            assembly(i32(), [address(sums), constant(block)], text, "=r,r,r", pure=True)
            for block in range(self.split)
        ]

    def offset(self, m, n) -> Any:
        """Returns the byte offset of the sum of row m and even column n in a warpgroup's buffer."""
        strip, t, e = _digits(m, STRIP // 2, 2)
        tile, warp, half, g = _digits(n, 4, 2, 8)
        register = total((total((tile, self.strips), strip), 4), (half, 2), e)
        return total((register, 4 * WARPGROUP), (warp, 128), (g, 16), (t, 4))

    def cluster_sum(self, bases: list[Any], offset, e: int) -> Any:
        """Sums the element at ``offset`` (e = 1: the next column's) over blocks and warpgroups."""
        f32 = ir.F32Type.get()
        found = []
        for base in bases:
            for group in range(self.groups):
                byte = 4 * (group * self.count * WARPGROUP + 4 * e)
                text = f"ld.shared::cluster.f32 $0, [$1+{byte}];"
                found.append(assembly(f32, [total(base, offset)], text, "=f,r", pure=False))
        return functools.reduce(arith.addf, found)

    def store_pair(self, out, at, found: list[Any]) -> None:
        """Writes two neighboring results to global memory, from element ``at`` of ``out`` on."""
        place = global_place(out, at, self.out_dtype.itemsize)
        if self.out_dtype == jnp.float32:
            text = "st.global.v2.f32 [$0], {$1,$2};"
            assembly(None, [place, *found], text, "l,f,f", pure=False)
            return
        both = packed_pair(found, self.out_dtype)
        assembly(None, [place, both], "st.global.b32 [$0], $1;", "l,r", pure=False)


def _digits(x: Any, *bases: int) -> list[Any]:
    """x in a mixed number system whose digits but the first have these bases."""
    digits = []
    for base in reversed(bases):
        digits.insert(0, arith.remui(x, constant(base)))
        x = arith.divui(x, constant(base))
    return [x, *digits]
