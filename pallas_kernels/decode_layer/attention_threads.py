"""Per-thread code of a layer's attention.

Eight lanes hold one key of a tile, 8 columns each; the warp's other lanes hold other keys. So reads
of shared memory have no bank conflicts. The lanes of a key also hold its value and compute its
probability.

Dims: as in ``attention``.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.each_thread import warp_and_lane
from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.machine import LANES
from pallas_kernels.hopper.mosaic import arith, mgpu_utils
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    exp2,
    from_lane_xor,
    fused,
    global_place,
    loaded,
    number,
    packed_pair,
    total,
    widened_pair,
)
from pallas_kernels.hopper.tile import LOG2E

from .config import DEPTH, SLICES, THREADS, WIDTH, WorkSplit
from .inputs import QUAD, Columns, Rows, added, load_quad, place_of, quads, store_quad
from .per_thread import below, row_place, thread_anew

_COLUMNS = 8  # of a lane: 16 bytes
_ACROSS = WIDTH // _COLUMNS
_DOWN = LANES // _ACROSS  # lanes of a warp with other keys
_BELOW_ALL, _NO_MAXIMUM = -3e38, -1e30  # the score of no key, and the maximum of no scores
_PADDING = 4  # numbers of a warp's result beside its columns: its maximum and sum are two of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadSizes:
    """Sizes of attention heads, and the per-thread code on i32 and f32 registers."""

    N: int
    K: int
    H: int
    scale: float
    dtype: jnp.dtype
    split: WorkSplit  # division of the QKV product among blocks

    @property
    def group(self) -> int:
        """Number of query heads per kv head."""
        return self.N // self.K

    @property
    def halves(self) -> int:
        """Number of 64-column halves in a head."""
        return self.H // WIDTH

    @property
    def keys(self) -> int:
        """Number of keys per tile: as many as make it as large as a weight tile."""
        return DEPTH // self.halves

    @property
    def rows(self) -> int:
        """Number of keys per tile that one thread handles."""
        return self.keys // (SLICES * _DOWN)

    @property
    def num_registers(self) -> int:
        """Number of accumulators per thread: each query head's columns, maximum and sum."""
        return self.group * (_COLUMNS * self.halves + 2)

    @property
    def x_numbers(self) -> int:
        """Number of fp32 elements in shared memory: queries, new key and value, warps' results."""
        return (self.group + 2) * self.H + SLICES * self.group * (self.H + _PADDING)

    def nothing(self) -> list[Any]:
        """Returns a thread's initial accumulators: values, softmax maxima and softmax sums."""
        sums = self.group * _COLUMNS * self.halves
        none = [number(0.0)] * sums
        return none + [number(_NO_MAXIMUM)] * self.group + [number(0.0)] * self.group

    def put_heads(self, heads, cos, sin, x, pages: Sequence[Any], h, place) -> None:
        """Stores a kv head's rotated queries and new key, and its new value, in fp32 into ``x``.

        The new key and value are also rounded and written to slot ``place`` of the pages, unless
        ``place`` is below 0.
        """
        per_head, columns = self.H // (2 * QUAD), Columns(split=self.split)
        for unit in quads((self.group + 2) * per_head):
            u, i = (f(unit, constant(per_head)) for f in (arith.divui, arith.remui))
            is_query = below(u, constant(self.group))
            is_value = arith.cmpi(arith.CmpIPredicate.eq, u, constant(self.group + 1))
            head = total((h, self.group), u)
            others = arith.select(is_value, constant(self.N + self.K), constant(self.N))
            head = arith.select(is_query, head, total(others, h))
            at = total((i, QUAD))
            firsts = [total((head, self.H), at, constant(half)) for half in (0, self.H // 2)]
            partial_sums = [columns.partial_sums(heads, first) for first in firsts]
            angles = [
                [
                    arith.bitcast(ir.F32Type.get(), word)
                    for word in loaded(
                        "ld.global.nc.v4.b32", global_place(each, at, 4), QUAD, kind="l"
                    )
                ]
                for each in (cos, sin)
            ]
            low, high = map(added, partial_sums)
            factor = arith.select(is_query, number(self.scale * LOG2E), number(1.0))
            turned: list[list[Any]] = [[], []]
            for a, b, c, s in zip(low, high, *angles, strict=True):
                c = arith.select(is_value, number(1.0), c)
                s = arith.select(is_value, number(0.0), s)
                first = arith.subf(arith.mulf(a, c), arith.mulf(b, s))
                second = arith.addf(arith.mulf(b, c), arith.mulf(a, s))
                turned[0].append(arith.mulf(first, factor))
                turned[1].append(arith.mulf(second, factor))
            for half, found in enumerate(turned):
                store_quad(x, total((u, self.H), at, constant(half * self.H // 2)), found)
            is_kept = arith.cmpi(arith.CmpIPredicate.sge, place, constant(0))
            for which, pool in enumerate(pages):
                is_this = arith.cmpi(arith.CmpIPredicate.eq, u, constant(self.group + which))
                with mgpu_utils.when(arith.andi(is_kept, is_this)):
                    for half, found in enumerate(turned):
                        row = total((place, self.K), h)
                        column = total(at, constant(half * self.H // 2))
                        to = row_place(pool, row, column, self.H)
                        words = [packed_pair(found[e : e + 2], self.dtype) for e in (0, 2)]
                        text = "st.global.v2.b32 [$0], {$1,$2};"
                        assembly(None, [to, *words], text, "l,r,r", pure=False)
        meet_in_block(THREADS)

    def put_token(self, x, k, v, row) -> None:
        """Stores the new key and value, rounded, in row ``row`` of the tiles at k and v."""
        across = self.H // _COLUMNS
        mine = mgpu_utils.thread_idx()
        with mgpu_utils.when(below(mine, constant(across))):
            column = total((mine, _COLUMNS))
            half, inside = (f(column, constant(WIDTH)) for f in (arith.divui, arith.remui))
            to = total((half, self.keys), row)
            for which, tile in enumerate((k, v)):
                source = total(address(x), (column, 4), constant(4 * (self.group + which) * self.H))
                found = self._numbers(source, _COLUMNS)
                words = [packed_pair(found[e : e + 2], self.dtype) for e in range(0, _COLUMNS, 2)]
                place = total(tile, (to, 2 * WIDTH), (inside, 2))
                text = "st.shared.v4.b32 [$0], {$1,$2,$3,$4};"
                assembly(None, [place, *words], text, "r,r,r,r,r", pure=False)
        meet_in_block(THREADS)

    def tile(self, held: list[Any], x, k, v, left) -> list[Any]:
        """Adds attention to a tile's keys and values to a thread's accumulators ``held``."""
        warp, lane = warp_and_lane()
        across = arith.remui(lane, constant(_ACROSS))
        first = total((warp, self.rows * _DOWN), (arith.divui(lane, constant(_ACROSS)), self.rows))
        scores = [[number(0.0)] * self.group for _ in range(self.rows)]
        for half in range(self.halves):
            queries = [
                self._numbers(
                    total(address(x), (across, 4 * _COLUMNS)),
                    _COLUMNS,
                    offset=4 * (g * self.H + half * WIDTH),
                )
                for g in range(self.group)
            ]
            for j in range(self.rows):
                key = self._columns(k, first, across, half * self.keys + j)
                for g, query in enumerate(queries):
                    for a, b in zip(key, query, strict=True):
                        scores[j][g] = fused(a, b, scores[j][g])
        there = [below(total(first, constant(j)), left) for j in range(self.rows)]
        scores = [
            [
                arith.select(there[j], _over_lanes(s, arith.addf, (1, 2, 4)), number(_BELOW_ALL))
                for s in row
            ]
            for j, row in enumerate(scores)
        ]
        per_head = _COLUMNS * self.halves
        sums = [held[g * per_head : (g + 1) * per_head] for g in range(self.group)]
        peaks, totals = held[self.group * per_head :][: self.group], held[-self.group :]
        found: list[list[Any]] = []
        for g in range(self.group):
            mine = [row[g] for row in scores]
            peak = _over_lanes(functools.reduce(arith.maximumf, mine), arith.maximumf, (8, 16))
            peak = arith.maximumf(peak, peaks[g])
            shrink = exp2(arith.subf(peaks[g], peak))
            found.append([exp2(arith.subf(s, peak)) for s in mine])
            totals[g] = functools.reduce(arith.addf, found[g], arith.mulf(totals[g], shrink))
            sums[g] = [arith.mulf(each, shrink) for each in sums[g]]
            peaks[g] = peak
        for half in range(self.halves):
            for j in range(self.rows):
                value = self._columns(v, first, across, half * self.keys + j, there=there[j])
                for g in range(self.group):
                    for e, each in enumerate(value, half * _COLUMNS):
                        sums[g][e] = fused(found[g][j], each, sums[g][e])
        return [*(x for each in sums for x in each), *peaks, *totals]

    def write_partial(self, held: list[Any], x, attended, stats, h, part) -> None:
        """Merges all warps' accumulators; writes unnormalized columns, maximum and sum per head."""
        warp, lane = warp_and_lane()
        per_head, width = _COLUMNS * self.halves, self.H + _PADDING
        results = total(address(x), constant(4 * (self.group + 2) * self.H))
        mine = total(results, (warp, 4 * self.group * width))
        held = [
            _over_lanes(each, arith.addf, (8, 16)) if not self._is_peak(i) else each
            for i, each in enumerate(held)
        ]
        across = arith.remui(lane, constant(_ACROSS))
        with mgpu_utils.when(below(lane, constant(_ACROSS))):
            for g in range(self.group):
                for i in range(0, per_head, QUAD):
                    half, e = divmod(i, _COLUMNS)
                    place = total(mine, (across, 4 * _COLUMNS))
                    offset = 4 * (g * width + half * WIDTH + e)
                    numbers = held[g * per_head + i :][:QUAD]
                    text = f"st.shared.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}};"
                    assembly(None, [place, *numbers], text, "r,f,f,f,f", pure=False)
                peak, sums = (held[self.group * per_head + n * self.group + g] for n in range(2))
                text = f"st.shared.v2.f32 [$0+{4 * (g * width + self.H)}], {{$1,$2}};"
                assembly(None, [mine, peak, sums], text, "r,f,f", pure=False)
        meet_in_block(THREADS)
        for start in range(0, self.group * self.H, THREADS):
            place = total(thread_anew(), constant(start))
            with mgpu_utils.when(below(place, constant(self.group * self.H))):
                g, d = (f(place, constant(self.H)) for f in (arith.divui, arith.remui))
                row = total(results, (g, 4 * width))
                step = 4 * self.group * width
                peaks, sums, columns = (
                    [_shared_number(total(row, at), step * w) for w in range(SLICES)]
                    for at in (constant(4 * self.H), constant(4 * self.H + 4), total((d, 4)))
                )
                peak, factors = _factors(peaks)
                head = total((h, self.group), g)
                at = total((part, self.N), head)
                out = global_place(attended, total((at, self.H), d), 4)
                both = [out, _dot(factors, columns)]
                assembly(None, both, "st.global.f32 [$0], $1;", "l,f", pure=False)
                with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, d, constant(0))):
                    out = global_place(stats, total((at, 2)), 4)
                    text = "st.global.v2.f32 [$0], {$1,$2};"
                    assembly(None, [out, peak, _dot(factors, sums)], text, "l,f,f", pure=False)

    def _is_peak(self, i: int) -> bool:
        sums = self.group * _COLUMNS * self.halves
        return sums <= i < sums + self.group

    def _columns(self, tile, first, across, row: int, *, there: Any = None) -> list[Any]:
        """This lane's columns of a row of a tile, below its first one; 0 where it has none."""
        place = total(tile, (first, 2 * WIDTH), (across, 2 * _COLUMNS))
        words = loaded("ld.shared.v4.b32", place, 4, kind="r", offset=2 * WIDTH * row)
        if there is not None:
            words = [arith.select(there, word, constant(0)) for word in words]
        return [x for word in words for x in widened_pair(word, self.dtype)]

    def _numbers(self, place, count: int, *, offset: int = 0) -> list[Any]:
        """fp32 numbers in shared memory."""
        words = [
            word
            for i in range(0, count, QUAD)
            for word in loaded("ld.shared.v4.b32", place, QUAD, kind="r", offset=offset + 4 * i)
        ]
        return [arith.bitcast(ir.F32Type.get(), word) for word in words]


def put_attended(
    attended, stats, x: Rows, block, plan: Sequence[Any], sizes: HeadSizes, split: WorkSplit
) -> None:
    """Merges attention's partial results into shared memory, as input of the block's next product.

    One thread per head computes the factors of the head's partial results, while all threads wait
    for their reads of columns.

    Args:
        plan: numbers of key tiles per head, of all key tiles, and of blocks that have any.
        split: division of the next product among blocks.
    """
    parts = most_parts(sizes.K, split.blocks)
    factors = total(address(x.smem), constant(4 * split.most_rows))
    for i, quad in enumerate(quads(split.most_rows // QUAD)):
        at, column = place_of(quad, block, split)
        head, d = (f(column, constant(sizes.H)) for f in (arith.divui, arith.remui))
        partial_sums = []
        for part in range(parts):
            row = total(head, constant(part * sizes.N))
            partial_sums.append(load_quad(attended, total((row, sizes.H), d)))
        if i == 0:
            _put_factors(stats, factors, parts, block, plan, sizes, split)
            meet_in_block(THREADS)
        mine = total(factors, (arith.divui(at, constant(sizes.H)), 4 * parts))
        sums = [number(0.0)] * QUAD
        for part, found in enumerate(partial_sums):
            factor = _shared_number(mine, 4 * part)
            # What no block has written may be no number.
            is_none = arith.cmpf(arith.CmpFPredicate.OEQ, factor, number(0.0))
            for e, each in enumerate(found):
                sums[e] = fused(factor, arith.select(is_none, number(0.0), each), sums[e])
        x.store(at, sums)


def _put_factors(
    stats, factors, parts: int, block, plan, sizes: HeadSizes, split: WorkSplit
) -> None:
    """Writes the factors of the parts of each of the block's heads to shared memory."""
    tiles, line, blocks = plan
    mine, heads = thread_anew(), split.most_rows // sizes.H
    assert heads <= THREADS, "a thread has a head"
    with mgpu_utils.when(below(mine, constant(heads))):
        _, column = place_of(total((mine, sizes.H // QUAD)), block, split)
        head = arith.divui(column, constant(sizes.H))
        both = []
        for part in range(parts):
            place = global_place(stats, total((head, 2), constant(2 * part * sizes.N)), 4)
            both.append(loaded("ld.relaxed.gpu.global.v2.b32", place, 2, kind="l"))
        first = arith.muli(arith.divui(head, constant(sizes.group)), tiles)
        last = total(first, tiles, constant(-1))
        line = arith.maxui(line, constant(1))
        ends = [
            arith.divui(total(arith.muli(total(tile, constant(1)), blocks), constant(-1)), line)
            for tile in (first, last)
        ]
        count = arith.subi(total(ends[1], constant(1)), ends[0])
        count = arith.select(below(constant(0), tiles), count, constant(0))
        peaks, sums = (
            [
                arith.select(
                    below(constant(part), count),
                    arith.bitcast(ir.F32Type.get(), words[which]),
                    number(otherwise),
                )
                for part, words in enumerate(both)
            ]
            for which, otherwise in enumerate((_NO_MAXIMUM, 0.0))
        )
        _, powers = _factors(peaks)
        below_all = _dot(powers, sums)
        # Where nothing is seen, the result is 0.
        is_nothing = arith.cmpf(arith.CmpFPredicate.OEQ, below_all, number(0.0))
        below_all = arith.select(is_nothing, number(1.0), below_all)
        for part, each in enumerate(powers):
            each = arith.select(below(constant(part), count), each, number(0.0))
            place = total(factors, (mine, 4 * parts), constant(4 * part))
            text = "st.shared.f32 [$0], $1;"
            assembly(None, [place, arith.divf(each, below_all)], text, "r,f", pure=False)


def most_parts(heads: int, blocks: int) -> int:
    """Returns the largest number of blocks that can have key tiles of one head."""
    return math.ceil(blocks / heads) + 1


def _factors(peaks: list[Any]) -> tuple[Any, list[Any]]:
    """The largest maximum, and what sums below others are multiplied with."""
    peak = functools.reduce(arith.maximumf, peaks)
    return peak, [exp2(arith.subf(each, peak)) for each in peaks]


def _dot(xs: list[Any], ys: list[Any]) -> Any:
    return functools.reduce(
        lambda so_far, both: fused(*both, so_far), zip(xs, ys, strict=True), number(0.0)
    )


def _over_lanes(x: Any, combine: Any, distances: tuple[int, ...]) -> Any:
    for distance in distances:
        x = combine(x, from_lane_xor(x, distance))
    return x


def _shared_number(place, offset: int) -> Any:
    text = f"ld.shared.f32 $0, [$1+{offset}];"
    return assembly(ir.F32Type.get(), [place], text, "=f,r", pure=False)
