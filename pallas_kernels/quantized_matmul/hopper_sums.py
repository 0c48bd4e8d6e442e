"""Sums in registers: of warpgroups and of a cluster's blocks, added in one order, and written.

Every warpgroup puts its sums into its block's shared memory, each thread where the same thread of
another warpgroup puts those of the same elements. Then each block adds everyone's, of a part of the
columns, which it reads from the others' shared memory: nothing goes through global memory, and the
order is that of ranks and warpgroups whatever is ready first.

Dims: M row of x, N column of the weight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from pallas_kernels.hopper.held import Held
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu, mgpu_utils, plgpu

from .codes import COLUMNS
from .config import STRIP, WARPGROUP, WIDTH, ProductShape, QuantizedConfig
from .fragments import address, assembly, constant, global_number, i32, thread, total

QUADS = WARPGROUP // 4  # of threads: lanes of a warp that have the same column


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProductSums:
    """Of a warpgroup: of each of its tiles and strips four numbers a thread."""

    c: QuantizedConfig
    s: ProductShape
    scale_dtype: jnp.dtype
    out_dtype: jnp.dtype

    @property
    def count(self) -> int:
        """Numbers of a thread."""
        return self.c.tiles * self.s.strips * 4

    @property
    def held(self) -> Held:
        """The numbers as an array."""
        return Held(count=self.count, dtype=jnp.dtype(jnp.float32))

    def nothing(self) -> jax.Array:
        """Sums of nothing."""

        @plgpu.inline_mgpu(return_type=self.held.array)
        def zeros(ctx):
            del ctx
            return self.held.together([mgpu.c(0.0, ir.F32Type.get())] * self.count)

        return zeros()

    def finish(self, sums: jax.Array, gmem, smem, group: jax.Array) -> None:
        """Everyone's sums of this block's part of the columns, to the result."""

        @plgpu.inline_mgpu(arg_types=(self.held.layout, plgpu.RefType()))
        def keep(ctx, sums, ref):
            del ctx
            place = total(address(ref), (thread(), 4))
            for i, number in enumerate(self.held.apart(sums)):
                text = f"st.shared.f32 [$0+{4 * WARPGROUP * i}], $1;"
                assembly(None, [place, number], text, "r,f", pure=False)

        keep(sums, smem.sums.at[group])
        _meet(ordered=True)
        refs = [smem.sums, gmem.out] + [gmem.scales] * (not self.s.scaled_parts)
        place = (plgpu.Layout.WG_SPLAT(()),) * 3

        @plgpu.inline_mgpu(arg_types=(*place, *[plgpu.RefType()] * len(refs)))
        def add(ctx, column, row, group, *refs):
            del ctx
            write = self.write_quads if self.c.quads else self.write
            write(*(x.registers.flat[0] for x in (column, row, group)), *refs)

        column = lax.axis_index("columns") * (WIDTH * self.c.tiles)
        row = lax.axis_index("rows") * self.s.rows_at_a_time
        add(*(jnp.broadcast_to(x, ()) for x in (column, row, group)), *refs)
        _meet(ordered=False)

    def meet_as_bystander(self) -> None:
        """What a warpgroup without sums does meanwhile."""
        _meet(ordered=False)
        _meet(ordered=False)

    def write(self, column, row, group, sums, out, scales=None) -> None:
        """Two neighboring columns of one row at a time."""
        c, s = self.c, self.s
        width = WIDTH * c.tiles // c.split
        pairs, threads = width // 2 * s.rows_at_a_time, c.groups * WARPGROUP
        rank = arith.index_cast(i32(), mgpu_utils.cluster_idx())
        bases = self.everywhere(sums)
        for start in range(0, pairs, threads):
            pair = total(thread(), (group, WARPGROUP), constant(start))
            m, n = (f(pair, constant(width // 2)) for f in (arith.divui, arith.remui))
            n = total((n, 2), (rank, width))
            inside = arith.cmpi(arith.CmpIPredicate.ult, pair, constant(pairs))
            there = arith.cmpi(arith.CmpIPredicate.ult, total(m, row), constant(s.M))
            with mgpu_utils.when(arith.andi(inside, there)):
                found = [self.everyones(bases, self.offset(m, n), e) for e in range(2)]
                at = total(column, n)
                if scales is not None:
                    found = [
                        arith.mulf(x, global_number(scales, at, e, self.scale_dtype))
                        for e, x in enumerate(found)
                    ]
                self.store_pair(out, total((total(row, m), s.N), at), found)

    def everywhere(self, sums) -> list[Any]:
        """Where each block of the cluster keeps its sums."""
        text = "mapa.shared::cluster.u32 $0, $1, $2;"
        return [
            assembly(i32(), [address(sums), constant(block)], text, "=r,r,r", pure=True)
            for block in range(self.c.split)
        ]

    def offset(self, m, n) -> Any:
        """Bytes to the sum of row m and column n, an even one, among a warpgroup's."""
        strip, t, e = _digits(m, STRIP // 2, 2)
        tile, warp, half, g = _digits(n, 4, 2, 8)
        register = total((total((tile, self.s.strips), strip), 4), (half, 2), e)
        return total((register, 4 * WARPGROUP), (warp, 128), (g, 16), (t, 4))

    def everyones(self, bases: list[Any], offset, e: int) -> Any:
        """The sum over ranks and warpgroups, in this order; e: of the next column."""
        f32 = ir.F32Type.get()
        found = []
        for base in bases:
            for group in range(self.c.groups):
                byte = 4 * (group * self.count * WARPGROUP + 4 * e)
                text = f"ld.shared::cluster.f32 $0, [$1+{byte}];"
                found.append(assembly(f32, [total(base, offset)], text, "=f,r", pure=False))
        return functools.reduce(arith.addf, found)

    def store_pair(self, out, at, found: list[Any]) -> None:
        """Two elements, from element ``at`` on."""
        i64 = ir.IntegerType.get_signless(64)
        byte = arith.muli(arith.extui(i64, at), mgpu.c(self.out_dtype.itemsize, i64))
        place = arith.addi(llvm.ptrtoint(i64, mgpu_utils.memref_ptr(out)), byte)
        if self.out_dtype == jnp.float32:
            text = "st.global.v2.f32 [$0], {$1,$2};"
            assembly(None, [place, *found], text, "l,f,f", pure=False)
            return
        name = "bf16" if self.out_dtype == jnp.bfloat16 else "f16"
        both = assembly(i32(), found, f"cvt.rn.{name}x2.f32 $0, $2, $1;", "=r,f,f", pure=True)
        assembly(None, [place, both], "st.global.b32 [$0], $1;", "l,r", pure=False)

    def write_quads(self, column, row, group, sums, out, scales=None) -> None:
        """The same by four threads' sums of one register: four rows of one column.

        They lie side by side, so that a warp reads 512 bytes in a row of another block's memory.
        Compiled, and not yet run on a GPU.
        """
        c, s = self.c, self.s
        pieces, threads = self.count * QUADS // c.split, c.groups * WARPGROUP
        rank = arith.index_cast(i32(), mgpu_utils.cluster_idx())
        bases = self.everywhere(sums)
        for start in range(0, pieces, threads):
            mine = total(thread(), (group, WARPGROUP), constant(start))
            piece = total(mine, (rank, pieces))
            register, warp, g = _digits(piece, 4, STRIP)
            tile, strip, half, e = _digits(register, s.strips, 2, 2)
            first = total(row, (strip, STRIP), e)
            inside = arith.cmpi(arith.CmpIPredicate.ult, mine, constant(pieces))
            there = arith.cmpi(arith.CmpIPredicate.ult, first, constant(s.M))
            with mgpu_utils.when(arith.andi(inside, there)):
                at = total(column, (tile, WIDTH), (warp, COLUMNS), (half, STRIP), g)
                found = self.everyones_quads(bases, total((piece, 16)))
                if scales is not None:
                    scale = global_number(scales, at, 0, self.scale_dtype)
                    found = [arith.mulf(x, scale) for x in found]
                for t, number in enumerate(found):
                    m = total(first, constant(2 * t))
                    there = arith.cmpi(arith.CmpIPredicate.ult, m, constant(s.M))
                    with mgpu_utils.when(there):
                        self.store(out, total((m, s.N), at), number)

    def everyones_quads(self, bases: list[Any], offset) -> list[Any]:
        """Four sums over ranks and warpgroups, in this order."""
        kind = llvm.StructType.get_literal([ir.F32Type.get()] * 4)
        found = []
        for base in bases:
            place = total(base, offset)
            for group in range(self.c.groups):
                byte = 4 * group * self.count * WARPGROUP
                text = f"ld.shared::cluster.v4.f32 {{$0,$1,$2,$3}}, [$4+{byte}];"
                found.append(assembly(kind, [place], text, "=f,=f,=f,=f,r", pure=False))
        f32 = ir.F32Type.get()
        columns = [[llvm.extractvalue(f32, four, [i]) for four in found] for i in range(4)]
        return [functools.reduce(arith.addf, each) for each in columns]

    def store(self, out, at, number) -> None:
        """One element of the result, rounded."""
        i16, i64 = (ir.IntegerType.get_signless(bits) for bits in (16, 64))
        byte = arith.muli(arith.extui(i64, at), mgpu.c(self.out_dtype.itemsize, i64))
        place = arith.addi(llvm.ptrtoint(i64, mgpu_utils.memref_ptr(out)), byte)
        if self.out_dtype == jnp.float32:
            assembly(None, [place, number], "st.global.f32 [$0], $1;", "l,f", pure=False)
            return
        name = "bf16" if self.out_dtype == jnp.bfloat16 else "f16"
        half = assembly(i16, [number], f"cvt.rn.{name}.f32 $0, $1;", "=h,f", pure=True)
        assembly(None, [place, half], "st.global.b16 [$0], $1;", "l,h", pure=False)


def _digits(x: Any, *bases: int) -> list[Any]:
    """x in a mixed number system whose digits but the first have these bases."""
    digits = []
    for base in reversed(bases):
        digits.insert(0, arith.remui(x, constant(base)))
        x = arith.divui(x, constant(base))
    return [x, *digits]


def _meet(*, ordered: bool) -> None:
    """Waits for every thread of the cluster; ordered: what they wrote before can be read after."""
    order = "release" if ordered else "relaxed"

    @plgpu.inline_mgpu()
    def meet(ctx):
        del ctx
        assembly(None, [], f"barrier.cluster.arrive.{order}.aligned;", "", pure=False)
        assembly(None, [], "barrier.cluster.wait.acquire.aligned;", "", pure=False)

    meet()
