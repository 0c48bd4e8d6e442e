"""Chunks of rows that begin at any element, in registers (``flat_copies``).

Dims: A part of a row in a warpgroup or a warp's row, M column or element of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu, mgpu_utils, plgpu
from pallas_kernels.hopper.mosaic import vector as vectors
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    global_place,
    i32,
    thread,
    total,
)

from .config import tile_layout
from .edges import store, store_single, store_where
from .flat_copies import FlatCopies, at_least, both, kinds, less, value, warp

SHARED = 3  # the address space


def read(
    copies: FlatCopies, slot: Any, *, row: Any, shape: tuple[int, int], vector: int
) -> jax.Array:
    """A chunk [A, M] of a slot, from the row's first unit on.

    Pallas's load of two columns at a time is ``ldmatrix``, which takes whole words alone.
    """
    kind = plgpu.ShapeDtypeStruct(shape, slot.dtype, layout=tile_layout(vector))

    @plgpu.inline_mgpu(arg_types=kinds(1, 1), return_type=kind)
    def read(_, row, slot):
        layout = tile_layout(vector).to_mgpu()
        start, *_ = copies.bounds(value(row), constant(0))
        at = total(copies.behind(start), _first(copies, shape[1], vector))
        first, step = total(address(slot), (at, copies.itemsize)), LANES * vector * copies.itemsize
        some = ir.VectorType.get((vector,), slot.type.element_type)
        pointer = llvm.PointerType.get(SHARED)
        places = [total(first, constant(k * step)) for k in range(shape[1] // (LANES * vector))]
        found = [llvm.load(some, llvm.inttoptr(pointer, place)) for place in places]
        registers = np.array(found, dtype=object).reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(row, slot)


def widened(x: jax.Array, *, vector: int) -> jax.Array:
    """bf16 [A, M] as fp32, by an instruction an element: the compiler takes two for each second."""
    layout = tile_layout(vector)
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=kind)
    def widened(_, x):
        f32, words = ir.F32Type.get(), ir.VectorType.get((vector // 2,), i32())
        found = []
        for register in x.registers.flat:
            pairs, each = vectors.bitcast(words, register), []
            for k in range(vector // 2):
                pair = vectors.extract(pairs, dynamic_position=[], static_position=[k])
                each.append(arith.shli(pair, constant(16)))
                each.append(arith.andi(pair, constant(0xFFFF0000)))
            each = [arith.bitcast(f32, bits) for bits in each]
            found.append(vectors.from_elements(ir.VectorType.get((vector,), f32), each))
        registers = np.array(found, dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widened(x)


def masked(
    copies: FlatCopies, x: Any, fill: float, *, row: Any, column: Any, vector: int, sure: int
) -> jax.Array:
    """A chunk [A, M] in which what is a neighbor's is fill.

    Args:
        sure: elements that are not behind the row's end, of any row and warpgroup.
    """
    layout = tile_layout(vector)
    kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, *kinds(2, 0)), return_type=kind)
    def masked(_, x, row, column):
        found, place = list(x.registers.flat), (value(row), value(column))
        for k, holds in doubtful(copies, place, x.shape[1], vector, sure).items():
            other = vectors.broadcast(found[k].type, mgpu.c(fill, ir.F32Type.get()))
            taken = holds[0]
            if len(holds) > 1:
                each = ir.VectorType.get((vector,), ir.IntegerType.get_signless(1))
                taken = vectors.from_elements(each, holds)
            found[k] = arith.select(taken, found[k], other)
        registers = np.array(found, dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return masked(x, row, column)


def write(
    copies: FlatCopies, x: Any, array: Any, *, row: Any, column: Any, vector: int, sure: int | None,
    branches: bool,
) -> None:  # fmt: skip
    """Stores a chunk [A, M] from registers, ``vector`` elements of a word at once.

    Args:
        sure: as in ``masked``; None if no element is a neighbor's.
        branches: around each store that not all threads do, for fewer registers: ``store_where``
            lets the compiler work on several at a time.
    """
    width, size = x.shape[1], x.dtype.itemsize  # sums are wider than what is copied

    @plgpu.inline_mgpu(arg_types=(tile_layout(vector), *kinds(2, 1)))
    def write(_, x, row, column, array):
        place = value(row), value(column)
        start, *bounds, mine = copies.bounds(*place)
        at = _first(copies, width, vector)
        begin = global_place(array, total(start, at), size)
        some = {} if sure is None else doubtful(copies, place, width, vector, sure)
        registers = list(x.registers.flat)

        def target(k: int) -> Any:
            return arith.addi(begin, mgpu.c(k * LANES * vector * size, begin.type))

        def store_ends(k: int) -> None:
            """Elements one after another, where a row begins or ends within a register."""
            holds = some.get(k, [])
            if len(holds) > 1:
                with mgpu_utils.when(both(mine, arith.xori(holds[0], holds[-1]))):
                    here = total(at, constant(k * LANES * vector))
                    store_single(registers[k], target(k), here, bounds, vector=vector, size=size)

        for k, register in enumerate(registers):
            holds = some.get(k, [])
            # A warp may have no row; a warpgroup that has none stops before.
            whole = both(mine, *holds[:1], *holds[-1:]) if copies.by_warps or holds else None
            if whole is None:
                store(register, target(k))
            elif branches:
                with mgpu_utils.when(whole):
                    store(register, target(k))
                store_ends(k)
            else:
                store_where(register, target(k), whole)
        for k in () if branches else some:  # behind all others, for these are branches
            store_ends(k)

    write(x, row, column, array)


def added(x: jax.Array, y: jax.Array, *, vector: int) -> jax.Array:
    """x + y, fp32 [A, M], here: LLVM would put additions off until a row's last branch, a part of
    ``write``, and keep all addends till there.
    """
    layout = tile_layout(vector)
    kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=kind)
    def added(_, x, y):
        found = []
        for registers in zip(x.registers.flat, y.registers.flat, strict=True):
            each = [
                [vectors.extract(r, dynamic_position=[], static_position=[e]) for r in registers]
                for e in range(vector)
            ]
            f32 = ir.F32Type.get()
            sums = [arith.addf(*pair, fastmath=arith.FastMathFlags.contract) for pair in each]
            sums = [assembly(f32, [x], "mov.b32 $0, $1;", "=f,f", pure=False) for x in sums]
            found.append(vectors.from_elements(registers[0].type, sums))
        registers = np.array(found, dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return added(x, plgpu.layout_cast(y, layout))


def doubtful(
    copies: FlatCopies, place: tuple[Any, Any], width: int, vector: int, sure: int
) -> dict[int, list[Any]]:
    """Of a thread's registers, those that may have a neighbor's elements, and whether what they
    have is the row's: each element where a row may begin or end within the register, else all.

    Args:
        place: row, as a piece's bounds are found by, and column.
        width: columns of a warp's part.
    """
    _, first, end, _ = copies.bounds(*place)
    at_once = LANES * vector  # elements of a warp's part that are in one register of its lanes
    shifts = copies.columns % copies.unit > 0
    ends = [(copies.columns + s) % copies.piece for s in (0, (copies.unit - 1) * shifts)]
    partial = {end % width // at_once for end in ends} | ({0} if shifts else set())
    last = 0 if copies.by_warps else (WARPS - 1) * width  # where the last warp's part begins
    found = {}
    for k in range(width // at_once):
        if k not in partial and last + (k + 1) * at_once <= sure:
            continue
        at = total(_first(copies, width, vector), constant(k * at_once))
        each = [total(at, constant(e)) for e in range(vector if k in partial else 1)]
        if k in partial:
            found[k] = [both(at_least(i, first), less(i, end)) for i in each]
        else:
            found[k] = [less(at, end)]
    return found


def _first(copies: FlatCopies, width: int, vector: int) -> Any:
    """Where in the piece this thread's first register lies."""
    at = total((arith.remui(thread(), constant(LANES)), vector))
    return at if copies.by_warps else total(at, (warp(), width))
