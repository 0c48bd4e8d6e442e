"""Wrappers that call per-thread code, which Pallas cannot express."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPGROUP
from pallas_kernels.hopper.mosaic import arith, mgpu, mgpu_utils, plgpu
from pallas_kernels.hopper.slots import COPIED
from pallas_kernels.hopper.threads import Address, assembly, constant, global_place, i32

from .config import WIDTH

_ACROSS = 2 * WIDTH // COPIED  # copies of a row of a tile
COPIED_ROWS = WARPGROUP // _ACROSS
"""Rows of a tile that a warpgroup copies at once."""


def splat(x: Any) -> jax.Array:
    """Converts a number to an int32 scalar argument of ``plgpu.inline_mgpu``."""
    return jnp.broadcast_to(x, ())


def each_thread(
    body: Callable[..., None],
    refs: Sequence[Any],
    numbers: Sequence[Any],
    *,
    layer: Any = 0,
    stacks: Sequence[Any] = (),
) -> None:
    """Runs ``body(*refs, *arrays, *numbers)`` in every thread, numbers as int32 registers.

    Args:
        layer, stacks: a layer's index, and arrays with a leading dim of layers; ``arrays`` are the
            addresses of that layer's entries.
    """
    first = len(refs) + len(stacks)
    kinds = [plgpu.RefType()] * first + [plgpu.Layout.WG_SPLAT(())] * (1 + len(numbers))
    sizes = [math.prod(stack.shape[1:]) * stack.dtype.itemsize for stack in stacks]

    @plgpu.inline_mgpu(arg_types=tuple(kinds))
    def run(ctx, *given):
        del ctx
        layer, *registers = (x.registers.flat[0] for x in given[first:])
        stacked = zip(given[len(refs) : first], sizes, strict=True)
        arrays = [layer_array(stack, layer, size) for stack, size in stacked]
        body(*given[: len(refs)], *arrays, *registers)

    run(*refs, *stacks, *map(splat, [layer, *numbers]))


def layer_array(stack: Any, layer: Any, size: int) -> Address:
    """Returns the address of a layer's ``size`` bytes in a stack, which may exceed 2**32 bytes."""
    return Address(global_place(stack, layer, size))


def thread_anew() -> Any:
    """Reads this thread's index in its block again, so that values derived from it are not hoisted.

    All layers derive the same values from the index. The compiler would compute them once and, as
    registers are too few, keep them in local memory.
    """
    return assembly(i32(), [], "mov.u32 $0, %tid.x;", "=r", pure=False)


def warp_and_lane() -> tuple[Any, Any]:
    """Returns the index of this thread's warp in its block, and of its lane in the warp."""
    thread = mgpu_utils.thread_idx()
    return arith.divui(thread, constant(LANES)), arith.remui(thread, constant(LANES))


def copied_place() -> tuple[Any, Any]:
    """Returns the row, and the 16-byte chunk of it, that this thread copies first in a tile."""
    mine = arith.remui(mgpu_utils.thread_idx(), constant(WARPGROUP))
    return arith.divui(mine, constant(_ACROSS)), arith.remui(mine, constant(_ACROSS))


def row_place(pool: Any, row: Any, column: Any, width: int) -> Any:
    """Returns the address of a head's column in a pool, which may have more than 2**31 elements.

    Args:
        row: ``slot * K + head``, the index of a slot's head in the pool.
        width: number of columns of a head, 16 bits each.
    """
    i64 = ir.IntegerType.get_signless(64)
    byte = arith.muli(arith.extui(i64, row), mgpu.c(2 * width, i64))
    return arith.addi(global_place(pool, column, 2), byte)


def beyond(place: Any, offset: int) -> Any:
    """Returns the global-memory address ``offset`` bytes after ``place``."""
    return arith.addi(place, mgpu.c(offset, ir.IntegerType.get_signless(64)))


def below(a: Any, b: Any) -> Any:
    """Compares ``a < b`` as unsigned integers."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)
