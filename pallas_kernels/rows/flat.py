"""Copies between flat arrays and shared memory that begin at any element, by the copy engine.

The engine asks for multiples of 16 bytes of the strides of its tensor maps, not of a coordinate. So
a map of a flat array [N] takes a box from any element on, and of rows that begin anywhere each lies
in shared memory as an even row would. A map sees the array as lines of 256 elements, the most that
a box has side by side, at strides of 256: its lines overlap, as the first coordinate is any of the
N elements, and one box of many lines is any long part of the array. What a map may not do is store
beyond a row's end. There boxes of whole lines, of 128 and of 64 elements are followed by single
elements: boxes of fewer begin where no box may, between multiples of 128 bytes of shared memory.

A piece is what is copied at once: a part of one row, full or cut off by the row's end. Pallas has
no such maps, and all threads of a warpgroup arrive where it copies; here one thread counts bytes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import (
    arith,
    memref,
    mgpu,
    mgpu_utils,
    nvvm,
    plgpu,
)
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    global_place,
    thread,
    total,
)

LINE = 256  # elements of a box side by side
MOST_LINES = 256  # of a box
SHORT_BOXES = (128, 64)  # of multiples of 128 bytes, down to 16-bit elements

type Columns = tuple[int, ...] | jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class _Lines:
    """A flat array of so many elements as overlapping rows of one map: [lines, N - ...].

    A box within the array is within the map, and all that the map has is within the array.
    """

    lines: int
    num_elements: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.lines, self.num_elements - LINE * (self.lines - 1)

    def apply(self, ref: Any) -> Any:
        kind = ir.MemRefType(ref.type)
        layout = ir.StridedLayoutAttr.get(0, [LINE, 1])
        seen = ir.MemRefType.get(self.shape, kind.element_type, layout, kind.memory_space)
        return memref.reinterpret_cast(
            seen, ref, [], [], [], static_offsets=[0], static_sizes=list(self.shape),
            static_strides=[LINE, 1],
        )  # fmt: skip

    def transform_index(self, index: Any) -> tuple[Any, ...]:
        return mgpu.c(0, ir.IndexType.get()), index[0]

    def transform_shape(self, shape: Any) -> tuple[int, ...]:
        del shape
        return self.lines, LINE

    def transform_gmem_shape(self, shape: Any) -> tuple[int, ...]:
        del shape
        return self.shape

    def transform_strides(self, strides: Any) -> tuple[int, ...]:
        del strides
        return LINE, 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlatCopies:
    """Copies of pieces of one size, of rows that follow each other in arrays of one dtype."""

    num_rows: int
    columns: int  # of a row
    piece: int  # columns of a full piece, whole lines
    itemsize: int
    by_warps: bool  # each warp of a warpgroup copies pieces of its own row, or one warp of one row

    @property
    def num_elements(self) -> int:
        """Of an array."""
        return self.num_rows * self.columns

    @property
    def cut(self) -> int:
        """Columns of the piece at a row's end, 0 if that one is full."""
        return self.columns % self.piece

    @property
    def arrivals(self) -> int:
        """Threads that arrive at a barrier."""
        return WARPS if self.by_warps else 1

    def begin(self, barriers: Any, count: int) -> None:
        """Makes barriers, int32 [2 count] of shared memory of one warpgroup."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def begin(_, ref):
            place, one = mgpu_utils.memref_ptr(ref), _one_thread(by_warps=False)
            for i in range(count):
                ptx = f"mbarrier.init.shared::cta.b64 [$0 + {8 * i}], {self.arrivals};"
                mgpu_utils.inline_ptx(ptx, place, predicate=one, has_side_effects=True)
            mgpu_utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

        begin(barriers)
        plgpu.commit_smem()

    def wait(self, barrier: Any, turn: Any) -> None:
        """Waits for the copies of a barrier's turn, 0 or 1 for every second."""

        @plgpu.inline_mgpu(arg_types=_kinds(1, 1))
        def wait(_, turn, ref):
            odd = arith.trunci(ir.IntegerType.get_signless(1), _value(turn))
            _barrier(ref).wait_parity(odd)

        wait(turn, barrier)

    def load(
        self, arrays: Sequence[Any], slots: Sequence[Any], barrier: Any, *, row: Any,
        columns: Columns, wanted: Any,
    ) -> None:  # fmt: skip
        """Asks for the pieces of a slot, and has the barrier count their bytes.

        Args:
            arrays: flat, in global memory.
            slots: of each array, [elements] in shared memory: pieces one after another.
            row: int32; of the first warp, if each has one.
            columns: where the pieces of a row begin; only one piece may begin at a traced column.
            wanted: whether to ask at all; if not, nobody may wait.
        """
        count, places = len(arrays), _places(columns)

        @plgpu.inline_mgpu(arg_types=_kinds(2 + len(places), 1 + 2 * count))
        def load(ctx, row, wanted, *rest):
            found, barrier = rest[: len(places)], _barrier(rest[len(places)])
            refs = rest[len(places) + 1 :]
            row, mine = self._mine(_value(row))
            exists = _both(_value(wanted), mine)
            one = _one_thread(by_warps=self.by_warps)
            num_bytes, boxes = constant(0), []
            for k, at, size, holds in self._pieces(columns, found):
                holds = _both(holds, exists)
                sizes = _boxes(size, stores=False)
                taken = constant(sum(s for _, s in sizes) * self.itemsize * count)
                num_bytes = total(num_bytes, arith.select(holds, taken, constant(0)))
                boxes += [(k, at, _both(holds, one), *box) for box in sizes]
            arrives = _both(one, _value(wanted))
            barrier.arrive_expect_tx(num_bytes, predicate=arrives)
            for k, at, holds, offset, size in boxes:
                for x, slot in zip(refs[:count], refs[count:], strict=True):
                    ctx.async_copy(
                        src_ref=x, dst_ref=self._part(slot, k, offset, size), barrier=barrier,
                        arrive=False, predicate=holds, **self._box(row, at, offset, size),
                    )  # fmt: skip

        load(row, wanted, *places, barrier, *arrays, *slots)

    def store(
        self, slots: Sequence[Any], arrays: Sequence[Any], *, row: Any, columns: Columns
    ) -> None:
        """Sends the pieces of a slot, as a group of copies; arguments as in ``load``.

        All threads must have written their part of the slots and said so (``commit_smem``).
        """
        count, places = len(arrays), _places(columns)

        @plgpu.inline_mgpu(arg_types=_kinds(1 + len(places), 2 * count))
        def store(ctx, row, *rest):
            found, refs = rest[: len(places)], rest[len(places) :]
            row, exists = self._mine(_value(row))
            one = _one_thread(by_warps=self.by_warps)
            for k, at, size, holds in self._pieces(columns, found):
                holds, boxes = _both(holds, exists), _boxes(size, stores=True)
                for slot, x in zip(refs[:count], refs[count:], strict=True):
                    for offset, width in boxes:
                        ctx.async_copy(
                            src_ref=self._part(slot, k, offset, width), dst_ref=x, arrive=False,
                            predicate=_both(holds, one), **self._box(row, at, offset, width),
                        )  # fmt: skip
                    done = sum(width for _, width in boxes)
                    self._store_singly(slot, x, (k, row, at), (done, size), holds)
            nvvm.cp_async_bulk_commit_group()

        store(row, *places, *slots, *arrays)

    def _mine(self, row: Any) -> tuple[Any, Any]:
        """This warp's row, and whether there is one."""
        if not self.by_warps:
            return row, mgpu.c(1, ir.IntegerType.get_signless(1))
        row = total(row, _warp())
        return row, arith.cmpi(arith.CmpIPredicate.slt, row, constant(self.num_rows))

    def _pieces(self, columns: Columns, found: Sequence[Any]) -> list[tuple[int, Any, int, Any]]:
        """Of each piece that a slot may have: its number, column, size and whether it has it."""
        if isinstance(columns, tuple):
            sizes = ((k, at, min(self.columns - at, self.piece)) for k, at in enumerate(columns))
            return [(k, constant(at), size, None) for k, at, size in sizes if size > 0]
        at, pieces = _value(found[0]), []
        if self.columns >= self.piece:
            last = constant(self.columns - self.piece)
            full = arith.cmpi(arith.CmpIPredicate.sle, at, last)
            pieces.append((0, at, self.piece, full))
        if self.cut:
            end = arith.cmpi(arith.CmpIPredicate.eq, at, constant(self.columns - self.cut))
            pieces.append((0, at, self.cut, end))
        return pieces

    def _box(self, row: Any, at: Any, offset: int, size: int) -> dict[str, Any]:
        """Where a box lies in an array, for the engine."""
        start = total((row, self.columns), at, constant(offset))
        start = arith.index_cast(ir.IndexType.get(), start)
        lines = (_Lines(size // LINE, self.num_elements),) if size > LINE else ()
        return {
            "gmem_slice": (mgpu_utils.ds(start, size),),
            "gmem_transform": lines,
            # Any other mode would become a copy without a map, whose places are multiples of 16.
            "oob_mode": plgpu.OOBFillMode.ZEROS,
        }

    def _start(self, k: int) -> Any:
        """Where this warp's k-th piece begins in a slot, in elements."""
        if not self.by_warps:
            return constant(k * self.piece)
        return total(constant(k * WARPS * self.piece), (_warp(), self.piece))

    def _part(self, slot: Any, k: int, offset: int, size: int) -> Any:
        """A box's part of the k-th piece of a slot."""
        start = arith.index_cast(ir.IndexType.get(), total(self._start(k), constant(offset)))
        part = mgpu_utils.memref_slice(slot, (mgpu_utils.ds(start, size),))
        return mgpu_utils.memref_unfold(part, 0, (size // LINE, LINE)) if size > LINE else part

    def _store_singly(
        self, slot: Any, x: Any, place: tuple[int, Any, Any], part: tuple[int, int], holds: Any
    ) -> None:
        """Stores the last columns of a piece, an element to a thread."""
        (k, row, at), (done, size) = place, part
        threads = LANES if self.by_warps else LANES * WARPS
        bits = 8 * self.itemsize
        for first in range(done, size, threads):
            column = total(arith.remui(thread(), constant(threads)), constant(first))
            inside = arith.cmpi(arith.CmpIPredicate.slt, column, constant(size))
            source = total(address(slot), (total(self._start(k), column), self.itemsize))
            target = global_place(x, total((row, self.columns), at, column), self.itemsize)
            text = f"""{{
                .reg .b{bits} x;
                @$2 ld.shared.b{bits} x, [$0];
                @$2 st.global.b{bits} [$1], x;
            }}"""
            assembly(None, [source, target, _both(holds, inside)], text, "r,l,b", pure=False)


def _boxes(size: int, *, stores: bool) -> list[tuple[int, int]]:
    """(offset, elements) of the boxes of a piece: to load, which may reach beyond it, or store."""
    whole, box = size // LINE * LINE, MOST_LINES * LINE
    found = [(at, min(box, whole - at)) for at in range(0, whole, box)]
    if not stores:
        return found + [(whole, LINE)] * (size > whole)
    for box in SHORT_BOXES:
        if (size - whole) & box:
            found.append((whole, box))
            whole += box
    return found


def _places(columns: Columns) -> tuple[Any, ...]:
    return () if isinstance(columns, tuple) else (columns,)


def _kinds(num_numbers: int, num_refs: int) -> tuple[Any, ...]:
    splat = plgpu.Layout.WG_SPLAT(())
    return (splat,) * num_numbers + (plgpu.RefType(),) * num_refs


def _value(number: Any) -> Any:
    return number.registers.flat[0]


def _both(*conditions: Any) -> Any:
    """Whether all hold, as None does."""
    return functools.reduce(arith.andi, (x for x in conditions if x is not None))


def _warp() -> Any:
    return arith.divui(thread(), constant(LANES))


def _one_thread(*, by_warps: bool) -> Any:
    """Whether this thread is the one that asks: of each warp, or of the warpgroup."""
    subset = mgpu_utils.ThreadSubset
    return mgpu_utils.single_thread_predicate(subset.WARP if by_warps else subset.WARPGROUP)


def _barrier(ref: Any) -> Any:
    return mgpu_utils.BarrierRef(mgpu_utils.memref_ptr(ref), constant(0), None, 1)
