"""Writes a tile whose first and last columns may belong to a neighbor."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu_utils, plgpu
from pallas_kernels.hopper.mosaic import vector as vectors
from pallas_kernels.hopper.threads import (
    assembly,
    constant,
    global_place,
    i32,
    thread,
    total,
)

from .config import tile_layout


def write_between(value, ref, bounds: tuple[jax.Array, jax.Array], *, vector: int) -> None:
    """Stores a tile [A, M] one part after another, but columns outside of bounds.

    Of all threads' vectors only the tile's first and its last may reach beyond them.
    """
    width, size = value.shape[1], value.dtype.itemsize
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(tile_layout(vector), splat, splat, plgpu.RefType()))
    def write(_, value, first, end, ref):
        first, end = (x.registers.flat[0] for x in (first, end))
        warp = arith.divui(thread(), constant(LANES))
        lane = arith.remui(thread(), constant(LANES))
        start = total((warp, width), (lane, vector))
        registers = list(value.registers.flat)
        for k, register in enumerate(registers):
            column = total(start, constant(k * LANES * vector))
            place = global_place(ref, column, size)
            if 0 < k < len(registers) - 1:
                store(register, place)
            else:
                _store_within(register, place, column, (first, end), vector=vector, size=size)

    write(value, *(jnp.broadcast_to(x, ()) for x in bounds), ref)


def store(x: Any, place: Any) -> None:
    """To global memory."""
    llvm.store(x, llvm.inttoptr(llvm.PointerType.get(1), place))


def store_where(x: Any, place: Any, holds: Any) -> None:
    """Where it holds, words of a vector to global memory, without a branch: behind one each store
    would wait for its own numbers, and nothing would be computed meanwhile.
    """
    count = x.type.shape[0] * x.type.element_type.width // 32
    words = vectors.bitcast(ir.VectorType.get((count,), i32()), x)
    each = [vectors.extract(words, dynamic_position=[], static_position=[i]) for i in range(count)]
    for i in range(0, count, 4):
        some = each[i : i + 4]
        kind = f".v{len(some)}" if len(some) > 1 else ""
        names = ",".join(f"${j + 2}" for j in range(len(some)))
        text = f"@$1 st.global{kind}.b32 [$0+{4 * i}], {{{names}}};"
        assembly(None, [place, holds, *some], text, "l,b" + ",r" * len(some), pure=False)


def _store_within(register: Any, place: Any, column: Any, bounds, *, vector: int, size: int):
    """A vector whole, or those of its columns that are within bounds."""
    first, end = bounds
    behind = total(column, constant(vector))
    whole = arith.andi(_at_least(column, first), _at_least(end, behind))
    with mgpu_utils.when(whole):
        store(register, place)
    with mgpu_utils.when(arith.xori(whole, mgpu_utils.c(1, whole.type))):
        store_single(register, place, column, bounds, vector=vector, size=size)


def store_single(register: Any, place: Any, column: Any, bounds, *, vector: int, size: int):
    """Of a vector, one after another, those of its columns that are within bounds."""
    first, end = bounds
    for e in range(vector):
        at = total(column, constant(e))
        inside = arith.andi(_at_least(at, first), _at_least(end, total(at, constant(1))))
        with mgpu_utils.when(inside):
            one = vectors.extract(register, dynamic_position=[], static_position=[e])
            store(one, arith.addi(place, mgpu_utils.c(e * size, place.type)))


def _at_least(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.sge, a, b)
