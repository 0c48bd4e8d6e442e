"""TMA copies of tiles of arrays [B, T, N, H] whose length T is not a multiple of 8 ("odd").

The rows of a WGMMA operand are in groups of 8. Pallas's TMA descriptor has the whole array in such
groups, so T must be a multiple of 8. Here one descriptor covers the array up to its last whole
group. A tile that goes beyond is copied group by group with a second descriptor, of single rows:
rows after the array's end are read as zeros and not written.

Inline code cannot use Pallas's barriers, so these copies arrive at barriers of this module.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from .mosaic import arith, copies, mgpu, mgpu_utils, plgpu
from .threads import barrier_at, constant, one_thread

GROUP = 8
"""Number of rows per group."""

type TilePlace = tuple[Any, Any, Any]
"""Batch entry, first row (a multiple of 8) and head of a tile, int32 each."""


def is_odd(x: Any) -> bool:
    """Tells whether the length T of an array [B, T, N, H] is not a multiple of 8."""
    return x.shape[1] % GROUP != 0


def arrivals(count: int) -> Any:
    """Returns the shared memory buffer (int32) that holds ``count`` barriers."""
    return plgpu.SMEM((2 * count,), jnp.int32)


def make_arrivals(ref: Any) -> None:
    """Initializes the barriers of ``arrivals``, in the copying warpgroup before its first copy."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def make(_, ref):
        place, one = mgpu_utils.memref_ptr(ref), one_thread()
        for i in range(ref.type.shape[0] // 2):
            ptx = f"mbarrier.init.shared::cta.b64 [$0 + {8 * i}], 1;"
            mgpu_utils.inline_ptx(ptx, place, predicate=one, has_side_effects=True)
        mgpu_utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

    make(ref)
    plgpu.commit_smem()


def wait(ref: Any, which: Any, use: Any) -> None:
    """Waits until a copy that ``load_tile`` started has arrived in shared memory.

    Args:
        ref: the barriers; a synchronization after ``make_arrivals`` must precede this call.
        which: int32, index of the copy's barrier.
        use: int32, number of copies that arrived at this barrier before.
    """
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(splat, splat, plgpu.RefType()))
    def wait(_, which, use, ref):
        odd = arith.trunci(ir.IntegerType.get_signless(1), _value(use))
        barrier_at(ref, _value(which)).wait_parity(odd)

    wait(*_numbers((which, use)), ref)


def load_tile(
    source: Any, place: TilePlace, tile: Any, transforms: Any, ref: Any, which: Any
) -> None:
    """Starts the copy of a tile from global to shared memory.

    Args:
        source: [B, T, N, H] in global memory.
        place: where the tile begins in ``source``.
        tile: [rows, H] in shared memory, rows a multiple of 8.
        transforms: the tile's memory layout, from ``tile.tiled``.
        ref: the barriers of ``make_arrivals``.
        which: int32, index of the barrier where this copy arrives; all readers must wait there
            before the next copy to this barrier starts.
    """
    splat, types = plgpu.Layout.WG_SPLAT(()), _types(transforms)

    @plgpu.inline_mgpu(arg_types=(splat, *types, plgpu.RefType()))
    def load(ctx, which, numbers, source, tile, ref):
        barrier, one = barrier_at(ref, _value(which)), one_thread()
        barrier.arrive_expect_tx(_bytes(tile), predicate=one)

        def copy(part, window, transforms):
            ctx.async_copy(
                src_ref=source, dst_ref=part, gmem_slice=window, barrier=barrier, arrive=False,
                predicate=one, **transforms,
            )  # fmt: skip

        _copied(source, numbers, tile, copy)

    load(jnp.asarray(which, jnp.int32), _numbers(place), source, tile, ref)


def store_tile(tile: Any, sink: Any, place: TilePlace, transforms: Any) -> None:
    """Starts the copy of a tile to ``sink`` in global memory; other arguments as in ``load_tile``.

    The copy is committed as one group to wait for.
    """

    @plgpu.inline_mgpu(arg_types=_types(transforms))
    def store(ctx, numbers, sink, tile):
        one = one_thread()

        def copy(part, window, transforms):
            ctx.async_copy(
                src_ref=part, dst_ref=sink, gmem_slice=window, arrive=False, predicate=one,
                **transforms,
            )  # fmt: skip

        _copied(sink, numbers, tile, copy)

    store(_numbers(place), sink, tile)
    plgpu.commit_smem_to_gmem_group()


def _copied(array: Any, numbers: Any, tile: Any, copy: Callable[..., None]) -> None:
    """The copies of a tile [rows / 8, H / columns, 8, columns], in one piece or by groups."""
    b, row, head = (_value(x) for x in numbers)
    groups, _, _, columns = tile.type.shape
    length = array.type.shape[1]
    whole = (copies.TileTransform((GROUP, columns), rounding=copies.Rounding.DOWN),)
    # [8, H] as a group lies in shared memory: [H / columns, 8, columns].
    by_columns = (copies.TileTransform((columns,)), copies.TransposeTransform((1, 0, 2)))

    def part(tile, row, rows, transform):
        window = (_index(b), mgpu.ds(_index(row), rows), _index(head))
        swizzle = columns * mgpu_utils.bytewidth(tile.type.element_type)
        copy(tile, window, {"gmem_transform": transform, "swizzle": swizzle})

    if length % GROUP == 0:
        part(tile, row, groups * GROUP, whole)
        return
    end = arith.addi(row, constant(groups * GROUP))
    described = constant(length // GROUP * GROUP)
    with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.sle, end, described)):
        part(tile, row, groups * GROUP, whole)
    with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.sgt, end, described)):
        for i in range(groups):
            first = arith.addi(row, constant(i * GROUP))
            part(mgpu_utils.memref_slice(tile, (i,)), first, GROUP, by_columns)


def _types(transforms: Any) -> tuple[Any, ...]:
    """Returns argument types of a place, an array in global memory and a tile."""
    splat = plgpu.Layout.WG_SPLAT(())
    return (splat,) * 3, plgpu.RefType(), plgpu.RefType(transforms=transforms)


def _numbers(values: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x, jnp.int32) for x in values)


def _value(number: Any) -> Any:
    """A number's register."""
    return number.registers.flat[0]


def _index(x: Any) -> Any:
    return arith.index_castui(ir.IndexType.get(), x)


def _bytes(tile: Any) -> int:
    return math.prod(tile.type.shape) * mgpu_utils.bytewidth(tile.type.element_type)
