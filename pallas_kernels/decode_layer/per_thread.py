"""Places and numbers that each thread computes for itself."""

from typing import Any

from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import WARPGROUP
from pallas_kernels.hopper.mosaic import arith, mgpu, mgpu_utils
from pallas_kernels.hopper.slots import COPIED
from pallas_kernels.hopper.threads import assembly, constant, global_place, i32

from .config import WIDTH

_ACROSS = 2 * WIDTH // COPIED  # copies of a row of a tile
COPIED_ROWS = WARPGROUP // _ACROSS
"""Rows of a tile that a warpgroup copies at once."""


def thread_anew() -> Any:
    """Reads this thread's index in its block again, so that values derived from it are not hoisted.

    All layers derive the same values from the index. The compiler would compute them once and, as
    registers are too few, keep them in local memory.
    """
    return assembly(i32(), [], "mov.u32 $0, %tid.x;", "=r", pure=False)


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
