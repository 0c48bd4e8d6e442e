"""A few rows of x, copied to shared memory by the warpgroup that multiplies them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith, llvm, mgpu, mgpu_utils, plgpu

from .config import DEPTH, STRIP, WARPGROUP, ProductShape, QuantizedConfig
from .fragments import address, constant, copy_16_bytes, thread, total

CHUNK = 8  # numbers in 16 bytes
CHUNKS = DEPTH // CHUNK


def copy_rows(
    x_gmem: Any,
    x_smem: Any,
    first: jax.Array,
    group: jax.Array,
    *,
    c: QuantizedConfig,
    s: ProductShape,
) -> None:
    """Copies the columns of x that a block's warpgroup multiplies.

    A chunk of 8 numbers lies where its number xor the row's says, so that the rows of ``ldmatrix``
    are in different banks. Rows that x does not have stay as they are: no sum of another row reads
    them.

    Args:
        x_smem: [turns, strips, 2, 8, 64].
        first: the block's first stage.
    """
    number = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), number, number))
    def copy(ctx, x_gmem, x_smem, first, group):
        del ctx
        (first,), (group,) = first.registers.flat, group.registers.flat
        i64 = ir.IntegerType.get_signless(64)
        source = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(x_gmem))
        target = address(x_smem)
        pieces = c.turns(s) * s.M * CHUNKS
        for start in range(0, pieces, WARPGROUP):
            piece = total(thread(), constant(start))
            chunk, rest = (
                arith.andi(piece, constant(CHUNKS - 1)),
                arith.divui(piece, constant(CHUNKS)),
            )
            turn, m = arith.divui(rest, constant(s.M)), arith.remui(rest, constant(s.M))
            stage = total(group, (turn, c.groups))
            depth = total(first, stage)
            byte = total((m, 2 * s.K), (depth, 2 * DEPTH), (chunk, 2 * CHUNK))
            row = arith.andi(m, constant(STRIP - 1))
            half = arith.divui(chunk, constant(8))
            place = total(
                target,
                (turn, 256 * s.strips * STRIP),
                (arith.divui(m, constant(STRIP)), 256 * STRIP),
                (half, 128 * STRIP),
                (row, 128),
                (arith.xori(arith.andi(chunk, constant(7)), row), 16),
            )
            inside = arith.cmpi(arith.CmpIPredicate.ult, piece, constant(pieces))
            there = arith.cmpi(arith.CmpIPredicate.ult, stage, constant(c.steps(s)))
            with mgpu_utils.when(arith.andi(inside, there)):
                copy_16_bytes(arith.addi(source, arith.extui(i64, byte)), place)
        mgpu.warpgroup_barrier()

    copy(x_gmem, x_smem, jnp.broadcast_to(first, ()), jnp.broadcast_to(group, ()))
