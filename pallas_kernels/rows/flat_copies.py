"""Rows that begin at any element, through the bulk copy engine, which moves aligned 16 bytes.

A row, or a chunk of one, is copied from the last 16 bytes that begin no later (a "word" here) and
as far as words that it reaches into, so it lies in shared memory as many elements behind the start
of a slot as in global memory behind a word. Threads take it from the last unit (``flat_order``)
that begins no later, a word or a part of one, and it lies behind its shift there. Neighbors'
elements come along, and are never written (``flat_registers``). The tensor maps of the engine do
not help: a coordinate that is no multiple of 16 bytes ends a kernel with an illegal instruction on
an H200.

Pallas copies a fixed size, and there all threads of a warpgroup arrive at a barrier; here one asks
and counts the bytes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    global_place,
    thread,
    total,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlatCopies:
    """Copies of chunks of rows that follow each other in arrays of one dtype."""

    num_rows: int
    columns: int  # of a row
    piece: int  # columns of a chunk, or of each warp's
    itemsize: int
    by_warps: bool  # each warp of a warpgroup copies its own row, or one warp the warpgroup's
    unit: int  # elements; a chunk begins at a multiple of them
    spacing: int  # rows from a warp's to the next warp's, if each has its own

    @property
    def word(self) -> int:
        """Elements that the engine moves at least."""
        return 16 // self.itemsize

    @property
    def odd_end(self) -> int:
        """Elements behind the last whole word of an array."""
        return self.num_rows * self.columns % self.word

    def begin(self, barriers: Any, count: int) -> None:
        """Makes barriers, int32 [2 count] of shared memory of one warpgroup."""
        arrivals = WARPS if self.by_warps else 1

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def begin(_, ref):
            place, one = mgpu_utils.memref_ptr(ref), _one_thread(by_warps=False)
            for i in range(count):
                ptx = f"mbarrier.init.shared::cta.b64 [$0 + {8 * i}], {arrivals};"
                mgpu_utils.inline_ptx(ptx, place, predicate=one, has_side_effects=True)
            mgpu_utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

        begin(barriers)
        plgpu.commit_smem()

    def wait(self, barrier: Any, turn: Any) -> None:
        """Waits for the copies of a barrier's turn, 0 or 1 for every second."""

        @plgpu.inline_mgpu(arg_types=kinds(1, 1))
        def wait(_, turn, ref):
            odd = arith.trunci(ir.IntegerType.get_signless(1), value(turn))
            _barrier(ref).wait_parity(odd)

        wait(turn, barrier)

    def load(
        self, arrays: Sequence[Any], slots: Sequence[Any], barrier: Any, *, row: Any, column: Any,
        wanted: Any,
    ) -> None:  # fmt: skip
        """Asks for a chunk of each array, and has the barrier count the bytes.

        Args:
            arrays: flat, in global memory.
            slots: of each array, [elements] in shared memory.
            row: int32; the first warp's, if each has one.
            column: int32, where the chunk begins.
            wanted: whether to ask at all; if not, nobody may wait.
        """
        count = len(arrays)

        @plgpu.inline_mgpu(arg_types=kinds(3, 1 + 2 * count))
        def load(_, row, column, wanted, barrier, *refs):
            one = both(_one_thread(by_warps=self.by_warps), value(wanted))
            start, first, end, mine = self.bounds(value(row), value(column))
            behind = self.behind(start)
            start = arith.subi(start, behind)
            there = both(mine, less(first, end))
            size = _rounded(total(end, behind, constant(self.word - 1)), self.word)
            if self.odd_end:
                whole = self.num_rows * self.columns - self.odd_end
                size = arith.minsi(size, arith.subi(constant(whole), start))
            num_bytes = arith.muli(size, constant(self.itemsize))
            num_bytes = arith.select(there, num_bytes, constant(0))
            asks = both(one, less(constant(0), num_bytes))
            expected = arith.muli(num_bytes, constant(count))
            _barrier(barrier).arrive_expect_tx(expected, predicate=one)
            arrives = address(barrier)
            for x, slot in zip(refs[:count], refs[count:], strict=True):
                source = global_place(x, start, self.itemsize)
                target = total(address(slot), (self.piece_start(), self.itemsize))
                text = (
                    "@$4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                    "[$0], [$1], $2, [$3];"
                )
                assembly(
                    None, [target, source, num_bytes, arrives, asks], text, "r,l,r,r,b", pure=False
                )

        load(row, column, wanted, barrier, *arrays, *slots)

    def complete(self, arrays: Sequence[Any], slots: Sequence[Any], *, row: Any, column: Any):
        """Loads what is behind an array's last whole word, if the chunk reaches there."""
        count = len(arrays)

        @plgpu.inline_mgpu(arg_types=kinds(2, 2 * count))
        def complete(_, row, column, *refs):
            start, first, end, mine = self.bounds(value(row), value(column))
            whole = constant(self.num_rows * self.columns - self.odd_end)
            at = total(arith.subi(whole, start), self._index())
            inside = both(mine, less(at, end), at_least(at, first))
            inside = both(inside, less(self._index(), constant(self.odd_end)))
            for x, slot in zip(refs[:count], refs[count:], strict=True):
                place = self._place(slot, total(at, self.behind(start)))
                text = self._moved("ld.global", "$1", "st.shared", "$0")
                source = global_place(x, total(start, at), self.itemsize)
                assembly(None, [place, source, inside], text, "r,l,b", pure=False)

        complete(row, column, *arrays, *slots)
        plgpu.commit_smem()

    def bounds(self, row: Any, column: Any) -> tuple[Any, Any, Any, Any]:
        """Where this thread's piece begins in an array, at a unit; the bounds, in it, of what is
        the row's; whether there is such a row.
        """
        mine = less(row, constant(self.num_rows))
        if self.by_warps:
            row = total(row, (warp(), self.spacing))
            mine = less(row, constant(self.num_rows))
        begin = arith.muli(row, constant(self.columns))
        shift = arith.andi(begin, constant(self.unit - 1))
        start = arith.subi(total(begin, column), shift)
        left = arith.subi(constant(self.columns), column)
        first = arith.maxsi(arith.subi(shift, column), constant(0))
        end = arith.minsi(total(shift, left), constant(self.piece))
        return start, first, arith.maxsi(end, constant(0)), mine

    def _index(self) -> Any:
        """This thread's number among those that have a piece."""
        return arith.remui(thread(), constant(LANES if self.by_warps else LANES * WARPS))

    def behind(self, start: Any) -> Any:
        """Elements between a word and the place where a piece begins: 0 if units are words."""
        return arith.andi(start, constant(self.word - 1))

    def piece_start(self) -> Any:
        """Where this thread's piece begins in a slot, in elements."""
        return total((warp(), self.piece)) if self.by_warps else constant(0)

    def _place(self, slot: Any, at: Any) -> Any:
        """The address of an element of this thread's piece."""
        return total(address(slot), (total(self.piece_start(), at), self.itemsize))

    def _moved(self, load: str, source: str, store: str, target: str) -> str:
        """Assembly that copies an element, if operand 2 holds."""
        kind = f"b{8 * self.itemsize}"
        return f"""{{
            .reg .{kind} x;
            @$2 {load}.{kind} x, [{source}];
            @$2 {store}.{kind} [{target}], x;
        }}"""


def kinds(num_numbers: int, num_refs: int) -> tuple[Any, ...]:
    """Types of int32 numbers and of references."""
    splat = plgpu.Layout.WG_SPLAT(())
    return (splat,) * num_numbers + (plgpu.RefType(),) * num_refs


def value(number: Any) -> Any:
    """A number's register."""
    return number.registers.flat[0]


def less(a: Any, b: Any) -> Any:
    """Signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def at_least(a: Any, b: Any) -> Any:
    """Signed."""
    return arith.cmpi(arith.CmpIPredicate.sge, a, b)


def both(*conditions: Any) -> Any:
    """Whether all hold."""
    return functools.reduce(arith.andi, conditions)


def _rounded(x: Any, word: int) -> Any:
    """Down to words."""
    return arith.andi(x, constant(2**32 - word))


def warp() -> Any:
    """This thread's, of its warpgroup."""
    return arith.divui(thread(), constant(LANES))


def _one_thread(*, by_warps: bool) -> Any:
    """Whether this thread is the one that asks: of each warp, or of the warpgroup."""
    subset = mgpu_utils.ThreadSubset
    return mgpu_utils.single_thread_predicate(subset.WARP if by_warps else subset.WARPGROUP)


def _barrier(ref: Any) -> Any:
    phases: Any = None  # a wait is given its parity
    return mgpu_utils.BarrierRef(mgpu_utils.memref_ptr(ref), constant(0), phases, 1)
