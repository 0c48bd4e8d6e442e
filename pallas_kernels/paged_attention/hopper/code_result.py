"""A segment's result from those of four warps, each of which had some of the keys.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith, mgpu
from pallas_kernels.hopper.threads import assembly, constant, total
from pallas_kernels.quantized_weight.fragments import load_number

from .code_tile import STRIP, SUM, WARPS, CodeTile, exp2, f32, lane_of, maximum, over_lanes, warp_of
from .config import RESULT_PADDING, ROWS

THREADS = 32 * WARPS
F32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeResult:
    """How warps' results meet in shared memory."""

    tile: CodeTile

    def write(
        self,
        thread: Any,
        places: tuple[Any, Any],
        results: tuple[Any, Any, Any],
        softmax: list[Any],
        sums: list[Any],
        meet: Callable[[], None],
    ) -> None:
        """Merges, normalizes and writes to global memory.

        Args:
            places: of maxima and sums [2, 4, rows] and of results [4, rows, V + 4] in shared
                memory, fp32.
            results: where global memory has results and logsumexps, i64, and which partial result
                this is.
            softmax, sums: as the tile leaves them.
            meet: waits for the warpgroup.
        """
        tile, (numbers, parts) = self.tile, places
        g, t = lane_of(thread)
        columns = [STRIP * strip + e for strip in range(tile.strips) for e in range(2)]
        peaks = softmax[: tile.num_softmax]
        all_keys = [over_lanes(x, SUM) for x in softmax[tile.num_softmax :]]
        mine = total(numbers, (warp_of(thread), 4 * tile.rows), (t, 8))
        for column, peak, x in zip(columns, peaks, all_keys, strict=True):
            _store_shared(mine, 4 * column, peak)
            _store_shared(mine, 4 * (column + WARPS * tile.rows), x)
        meet()
        factors = []
        for column, peak in zip(columns, peaks, strict=True):
            top, weight = self._merged(total(numbers, (t, 8)), column)
            factors.append(arith.mulf(exp2(arith.subf(peak, top)), _inverse(weight)))
        width = tile.V + RESULT_PADDING
        row = total((warp_of(thread), tile.rows), (t, 2))
        place = total(parts, (row, 4 * width), (g, 4))
        for i, x in enumerate(sums):
            product, strip, half, e = _digits(i, tile.strips, 2, 2)
            column = tile.order.value_column(2 * product + half, tile.V)
            offset = 4 * ((STRIP * strip + e) * width + 8 * column)
            _store_shared(place, offset, arith.mulf(x, factors[2 * strip + e]))
        meet()
        self._leave(thread, parts, results)
        out_row = arith.remui(thread, constant(tile.rows))
        top, weight = self._merged(total(numbers, (out_row, 4)), 0)
        text = "lg2.approx.ftz.f32 $0, $1;"
        log = assembly(ir.F32Type.get(), [weight], text, "=f,f", pure=True)
        _, lse, partial = results
        lse_at = total((partial, ROWS), out_row)
        # The logarithm of 0 is -inf, which a finite maximum leaves as it is.
        _store_global(lse, lse_at, arith.addf(top, log))
        meet()

    def _merged(self, numbers: Any, column: int) -> tuple[Any, Any]:
        """Maximum and sum over warps of a query, from its place for the first."""
        rows = self.tile.rows
        peaks, sums = (
            [
                load_number(numbers, 4 * (column + (kind * WARPS + warp) * rows), F32)
                for warp in range(WARPS)
            ]
            for kind in range(2)
        )
        top = functools.reduce(maximum, peaks)
        weighed = [
            arith.mulf(x, exp2(arith.subf(peak, top))) for x, peak in zip(sums, peaks, strict=True)
        ]
        return top, functools.reduce(arith.addf, weighed)

    def _leave(self, thread: Any, parts: Any, results: tuple[Any, Any, Any]) -> None:
        """The sum over warps, neighboring columns by neighboring threads."""
        tile, (out, _, partial) = self.tile, results
        is_4_bit = tile.dequantizer.code.bits == 4
        whole = tile.V // 2 if is_4_bit else tile.V
        eighth = constant(whole // 8)
        column = arith.remui(thread, constant(tile.V))
        high, within = (f(column, constant(whole)) for f in (arith.divui, arith.remui))
        place = total((high, whole), (arith.remui(within, eighth), 8), arith.divui(within, eighth))
        width = tile.V + RESULT_PADDING
        first = arith.divui(thread, constant(tile.V))
        place = total(parts, (first, 4 * width), (place, 4))
        at = total((total((partial, tile.rows), first), tile.V), column)
        for row in range(0, tile.rows, THREADS // tile.V):
            found = [
                load_number(place, 4 * width * (warp * tile.rows + row), F32)
                for warp in range(WARPS)
            ]
            _store_global(
                out, total(at, constant(row * tile.V)), functools.reduce(arith.addf, found)
            )


def _inverse(x: Any) -> Any:
    """1 / x, and 0 for 0."""
    text = "rcp.approx.ftz.f32 $0, $1;"
    inverse = assembly(ir.F32Type.get(), [x], text, "=f,f", pure=True)
    is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, x, f32(0.0))
    return arith.select(is_zero, f32(0.0), inverse)


def _store_shared(place: Any, offset: int, x: Any) -> None:
    assembly(None, [place, x], f"st.shared.f32 [$0+{offset}], $1;", "r,f", pure=False)


def _store_global(base: Any, at: Any, x: Any) -> None:
    i64 = ir.IntegerType.get_signless(64)
    place = arith.addi(base, arith.muli(arith.extui(i64, at), mgpu.c(4, i64)))
    assembly(None, [place, x], "st.global.f32 [$0], $1;", "l,f", pure=False)


def _digits(x: int, *bases: int) -> list[int]:
    digits = []
    for base in reversed(bases):
        x, digit = divmod(x, base)
        digits.insert(0, digit)
    return [x, *digits]
