"""Stores of arrays from registers to memory, without TMA."""

import jax
from jaxlib.mlir import ir

from .mosaic import arith, mgpu, mgpu_utils, plgpu, vector
from .tile import STRIP, tile_layout

STORES_ARE_CHECKED = jax.__version_info__ >= (0, 12)


def write_registers(array: jax.Array, ref) -> None:
    """Stores a register array to memory element by element, whatever its layout.

    JAX 0.12 lowers ``ref[...] = array`` only if each thread stores 4 to 16 bytes, a warp fills
    whole sectors of 32 bytes, and no shared memory banks conflict. One number per row fills no
    sector. Eight fp32 columns per thread are two stores of 16 bytes, which L2 joins. JAX 0.11 has
    neither this rule nor ``plgpu.store``, and writes with the same instructions.
    """
    if STORES_ARE_CHECKED:
        plgpu.store(ref, array, optimized=False)  # pyrefly: ignore[missing-attribute]
    else:
        ref[...] = array


def write_rows(tile: jax.Array, ref, *, first: int = 0) -> None:
    """Writes the first rows of a 64-row register tile to an array, as many as the array has.

    Args:
        tile: [64, columns] as WGMMA leaves it: a thread has two neighboring numbers in one of each
            16 rows, and two in the row eight below.
        ref: [rows, columns] in global memory.
        first: index of the array's row that the tile's first row is written to.
    """
    rows = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(tile_layout(), plgpu.RefType()))
    def store(ctx, tile, ref):
        del ctx
        places = list(zip(tile.layout.thread_idxs(tile.shape), tile.registers.flat, strict=True))
        index = ir.IndexType.get()
        for half in range(1 if first + rows <= STRIP else 2):
            row = arith.subi(places[half][0][0], mgpu.c(first, index))
            # Rows before the first are large numbers.
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(rows, index))):
                for (_, column), value in places[half::2]:
                    vector.store(value, ref, [row, column])

    store(tile, ref)
