"""Chunks of rows in the registers of a warpgroup, between shared and global memory.

Dims: A part of a row in a warpgroup, or whole row; M column of it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu, mgpu_utils, plgpu
from pallas_kernels.hopper.mosaic import vector as vectors
from pallas_kernels.hopper.threads import assembly, constant, i32, thread, total

from .config import RowConfig, tile_layout
from .copies import Copies, both, kinds, less, value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A chunk in which some elements may belong to a neighboring row."""

    sure: int  # leading elements that are before the row's end in every row and warpgroup
    begins: bool  # whether a row may begin after the chunk's first element


def widened(x: jax.Array, *, vector: int) -> jax.Array:
    """Converts bf16 [A, M] to fp32 by one instruction per element; the compiler uses up to two."""
    layout = tile_layout(vector)
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=kind)
    def widened(_, x):
        f32, words = ir.F32Type.get(), ir.VectorType.get((vector // 2,), i32())
        found = []
        for register in x.registers.flat:
            pairs, each = vectors.bitcast(words, register), []
            for k in range(vector // 2):
                pair = _element(pairs, k)
                each.append(arith.shli(pair, constant(16)))
                each.append(arith.andi(pair, constant(0xFFFF0000)))
            each = [arith.bitcast(f32, bits) for bits in each]
            found.append(vectors.from_elements(ir.VectorType.get((vector,), f32), each))
        return _like(x, found)

    return widened(x)


def masked(
    copies: Copies, c: RowConfig, x: Any, fill: float, *, row: Any, column: Any, cut: Cut
) -> jax.Array:
    """Loads a chunk as fp32 [A, M], with ``fill`` in place of neighboring rows' elements."""
    layout = tile_layout(c.vector)
    kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, *kinds(2, 0)), return_type=kind)
    def masked(_, x, row, column):
        found = list(x.registers.flat)
        _, *bounds = copies.bounds(value(row), value(column))
        for k, holds in partly_valid(copies, c, bounds, cut).items():
            other = vectors.broadcast(found[k].type, mgpu.c(fill, ir.F32Type.get()))
            taken = holds[0]
            if len(holds) > 1:
                each = ir.VectorType.get((c.vector,), ir.IntegerType.get_signless(1))
                taken = vectors.from_elements(each, holds)
            found[k] = arith.select(taken, found[k], other)
        return _like(x, found)

    return masked(x, row, column)


def write(
    copies: Copies, c: RowConfig, x: Any, array: Any, *, row: Any, column: Any, cut: Cut | None
) -> None:
    """Stores a chunk [A, M] without neighboring rows' elements, ``vector`` elements at once."""
    width, size = x.shape[1], x.dtype.itemsize
    across = width // (LANES * c.vector)  # registers of a thread in a row

    @plgpu.inline_mgpu(arg_types=(tile_layout(c.vector), *kinds(2, 1)))
    def write(_, x, row, column, array):
        row, column = value(row), value(column)
        shift, *bounds = copies.bounds(row, column)
        at = _first(c, width)
        begin = copies.place(array, row, total(arith.subi(column, shift), at), size)
        some = {} if cut is None else partly_valid(copies, c, bounds, cut)
        for k, register in enumerate(x.registers.flat):
            down, right = divmod(k, across)
            behind = down * WARPS * width + right * LANES * c.vector
            place = arith.addi(begin, mgpu.c(behind * size, begin.type))
            holds = some.get(k, [])
            if not holds:
                _store(register, place)
                continue
            with mgpu_utils.when(both(holds[0], holds[-1])):
                _store(register, place)
            if len(holds) > 1:  # the row begins or ends within the register
                with mgpu_utils.when(arith.xori(holds[0], holds[-1])):
                    for e, holds_one in enumerate(holds):
                        with mgpu_utils.when(holds_one):
                            one = arith.addi(place, mgpu.c(e * size, begin.type))
                            _store(_element(register, e), one)

    write(x, row, column, array)


def added(x: jax.Array, y: jax.Array, *, vector: int) -> jax.Array:
    """Returns x + y, fp32 [A, M]; the compiler cannot move this addition.

    LLVM would delay the additions until ``write`` and keep all addends in registers until then.
    """
    layout = tile_layout(vector)
    kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=kind)
    def added(_, x, y):
        found, f32 = [], ir.F32Type.get()
        for pair in zip(x.registers.flat, y.registers.flat, strict=True):
            sums = [
                arith.addf(*(_element(r, e) for r in pair), fastmath=arith.FastMathFlags.contract)
                for e in range(vector)
            ]
            sums = [assembly(f32, [s], "mov.b32 $0, $1;", "=f,f", pure=False) for s in sums]
            found.append(vectors.from_elements(pair[0].type, sums))
        return _like(x, found)

    return added(x, plgpu.layout_cast(y, layout))


def partly_valid(copies: Copies, c: RowConfig, bounds: Any, cut: Cut) -> dict[int, list[Any]]:
    """Returns which of a thread's registers may hold a neighboring row's elements.

    Each maps to the condition that its elements belong to the row: one for all of them, or one per
    element if a row may begin or end within the register.

    Args:
        bounds: (begin, end) of the row's own elements in the chunk.
    """
    first, end = bounds
    at_once = LANES * c.vector  # elements of a warp's part that are in one register of its lanes
    shifts = copies.columns % copies.word > 0
    ends = (copies.columns, copies.columns + (copies.word - 1) * shifts)
    partial = {e % copies.piece % c.tile // at_once for e in ends if e % c.vector or shifts}
    if cut.begins:
        partial.add(0)
    last = (WARPS - 1) * c.tile  # where the last warp's part begins
    found = {}
    for k in range(c.tile // at_once):
        if k not in partial and last + (k + 1) * at_once <= cut.sure:
            continue
        at = total(_first(c, c.tile), constant(k * at_once))
        if k in partial:
            each = [total(at, constant(e)) for e in range(c.vector)]
            found[k] = [both(_at_least(i, first), less(i, end)) for i in each]
        else:
            found[k] = [less(at, end)]
    return found


def _first(c: RowConfig, width: int) -> Any:
    """Offset of this thread's first register within a chunk."""
    lane, warp = (f(thread(), constant(LANES)) for f in (arith.remui, arith.divui))
    return total((lane, c.vector), (warp, width))


def _store(x: Any, place: Any) -> None:
    llvm.store(x, llvm.inttoptr(llvm.PointerType.get(1), place))


def _element(register: Any, k: int) -> Any:
    return vectors.extract(register, dynamic_position=[], static_position=[k])


def _like(x: Any, registers: list[Any]) -> Any:
    """An array as x, of other registers."""
    found = np.array(registers, dtype=object).reshape(x.registers.shape)
    return mgpu.FragmentedArray(_registers=found, _layout=x.layout, _is_signed=None)


def _at_least(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.sge, a, b)
