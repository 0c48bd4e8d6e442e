"""Per-thread instructions for a tile of quantized keys and values.

A warp has some of the tile's keys and its own softmax sums, so warps wait for no other warp until a
segment ends. Scores are computed as keys times queries. The score fragments, transposed, are then
the right operand of values times probabilities. Scales multiply scores and probabilities, not
codes. Queries are columns of products: lane ``4 g + t`` has queries ``8 n + 2 t + e`` for strip n
and e in 0, 1.

A warp computes products of 16 keys, or of 16 columns of values, with 8 queries at a time
(``mma.m16n8k16``). The order of keys in a product's rows, and of contracted columns, is free as
long as both operands agree. It is chosen so that lanes read different banks, and one instruction
dequantizes a word's codes to one register:

* keys: row g of a product need not be the g-th key. The product with values contracts keys in the
  same order.
* columns of keys: word by word, in the order of the words of a row that a lane loads.
* columns of values: row g of a product is a column in the g-th eighth of a value's bytes.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import arith, mgpu
from pallas_kernels.hopper.threads import assembly, constant, exp2, fused, i32, number, total
from pallas_kernels.hopper.tile import LOG2E
from pallas_kernels.paged_attention.spec import PagedSpec
from pallas_kernels.quantized_weight import WeightCode
from pallas_kernels.quantized_weight.fragments import Dequantizer, load_number, load_words

from .config import RESULT_PADDING, ROWS

STRIP = 8  # queries of a product
KEYS = 16  # of a product
WARPS = 4
THREADS = 32 * WARPS
F32 = jnp.dtype("float32")
BF16 = jnp.dtype("bfloat16")
MAX, SUM = (f"{name}.f32 $0, $1, $2;" for name in ("max", "add"))
# By bytes of a row. Of 8 keys, the first of lane t's pair is ``t times`` and the bits of t that a
# mask keeps: those of t = 0..3 are in different banks. The second differs in these bits.
FIRST_KEY = {128: (2, 0), 64: (1, 2), 32: (1, 0)}
FLIP = {128: 5, 64: 3, 32: 6}
SWIZZLE_SHIFT = {128: 0, 64: 1, 32: 2}  # the bits of a row's number that move its 16-byte chunks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeOrder:
    """Order of quantized codes within 32-bit words, as ``Dequantizer.two`` unpacks them."""

    code: WeightCode

    @property
    def steps(self) -> int:
        """Number of products that two rows' words give operands for, two registers per lane."""
        return 8 // self.code.bits

    def bytes_of(self, place: int) -> tuple[int, int]:
        """Returns the two bytes of a word that are dequantized to register number ``place``."""
        match self.code:
            case WeightCode.E4M3:
                return 1 - place, 3 - place
            case WeightCode.INT8:
                return 2 * place, 2 * place + 1
            case _:
                return place // 2, place // 2 + 2

    def is_high(self, place: int) -> bool:
        """Tells whether register number ``place`` holds columns of the second half of a head."""
        return self.code is WeightCode.INT4 and place % 2 == 1

    def selection(self, half: int) -> int:
        """Returns the ``prmt`` selector of bytes ``2 half`` and ``2 half + 1`` of two words."""
        in_turn = self.code is WeightCode.INT8
        return ((0x5140, 0x7362) if in_turn else (0x5410, 0x7632))[half]

    def byte_of(self, half: int, place: int) -> int:
        """Returns the byte of each source word from which register ``place`` is dequantized."""
        first, _ = self.bytes_of(place)
        return 2 * half + (first // 2 if self.code is WeightCode.INT8 else first)

    def key_words(self, row_bytes: int) -> int:
        """Returns the number of 32-bit words of a key's row that a lane loads at a time."""
        return min(4, row_bytes // 16)

    def key_byte(self, word: int, row_bytes: int) -> tuple[int, int]:
        """Returns a and b, where lane t's word begins at byte ``a + b t`` of a key's row."""
        at_a_time = self.key_words(row_bytes)
        return word // at_a_time * 16 * at_a_time + 4 * (word % at_a_time), 4 * at_a_time

    def value_column(self, register: int, width: int) -> int:
        """Returns the column, within an eighth of a value, to which a product's register belongs.

        Args:
            register: index of the register; a product has two, of rows g and g + 8, in the order of
                ``value_places``.
        """
        word, half, place = self.value_places(width)[register]
        column = 4 * word + self.byte_of(half, place)
        return column + (width // 16 if self.is_high(place) else 0)

    def value_places(self, width: int) -> list[tuple[int, int, int]]:
        """Returns (index of the lane's word, half, place) for each register of two keys' values."""
        words = width * self.code.bits // 256
        return [
            (word, half, place)
            for word in range(words)
            for half in range(2)
            for place in range(2 * self.steps)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeTile:
    """Sizes and per-thread instructions (i32, f32) of a tile of quantized keys and values."""

    H: int
    V: int
    keys: int
    rows: int  # rows of queries
    tokens: int
    span: int  # rows per token
    scale_heads: int  # kv heads whose scales are contiguous in a tile
    spec: PagedSpec
    dequantizer: Dequantizer

    @property
    def order(self) -> CodeOrder:
        """Order of quantized codes within 32-bit words."""
        return CodeOrder(code=self.dequantizer.code)

    @property
    def key_bytes(self) -> int:
        """Number of bytes of one key's codes."""
        return self.H * self.dequantizer.code.bits // 8

    @property
    def value_bytes(self) -> int:
        """Number of bytes of one value's codes."""
        return self.V * self.dequantizer.code.bits // 8

    @property
    def strips(self) -> int:
        """Number of strips of 8 query rows."""
        return self.rows // STRIP

    @property
    def blocks(self) -> int:
        """Number of products, of 16 keys each, for a warp's keys of the tile."""
        return self.keys // (KEYS * WARPS)

    @property
    def num_queries(self) -> int:
        """Number of i32 registers per thread that hold queries."""
        return self.H // 8 * self.strips

    @property
    def num_softmax(self) -> int:
        """Number of f32 registers per thread for row maxima, and also for sums and for factors."""
        return 2 * self.strips

    @property
    def num_weights(self) -> int:
        """Number of i32 registers per thread that hold softmax probabilities."""
        return 2 * self.blocks * self.strips

    @property
    def num_sums(self) -> int:
        """Number of f32 registers per thread that hold sums of values times probabilities."""
        return self.V // 4 * self.strips

    def queries(self, thread: Any, q: Any) -> list[Any]:
        """Loads this thread's queries as right operands of the product with keys.

        Args:
            q: address of the tile of queries: rows of 64 columns in groups of 8, with swizzled
                chunks.
        """
        g, t = lane_of(thread)
        found = []
        for strip in range(self.strips):
            row = total(q, (g, 128), constant(strip * 16 * self.H))
            for word in range(self.key_bytes // 16):
                for place in range(2 * self.order.steps):
                    pair = [
                        self._query(row, g, t, self._key_column(word, place, e)) for e in (0, 1)
                    ]
                    found.append(_join(*pair))
        return found

    def _key_column(self, word: int, place: int, e: int) -> tuple[int, int]:
        """A number and the factor of t."""
        first, times = self.order.key_byte(word, self.key_bytes)
        column = first + self.order.bytes_of(place)[e]
        return column + (self.H // 2 if self.order.is_high(place) else 0), times

    def _query(self, row: Any, g: Any, t: Any, column: tuple[int, int]) -> Any:
        first, times = column
        panel, first = divmod(first, 64)
        # Chunks of 8 columns: those of the two terms have no bit in common.
        chunk = arith.xori(total((t, times // 8)), constant(first // 8))
        place = total(row, (arith.xori(chunk, g), 16))
        text = f"ld.shared.b16 $0, [$1+{1024 * panel + 2 * (first % 8)}];"
        half = assembly(ir.IntegerType.get_signless(16), [place], text, "=h,r", pure=False)
        return arith.extui(i32(), half)

    def _key_in_8(self, slot: Any) -> Any:
        """The key of a product's row, of 8."""
        t, odd = arith.shrui(slot, constant(1)), arith.andi(slot, constant(1))
        return arith.xori(self._first_key(t), total((odd, FLIP[self.key_bytes])))

    def _first_key(self, t: Any) -> Any:
        times, mask = FIRST_KEY[self.key_bytes]
        return total((t, times), arith.andi(t, constant(mask)))

    def probabilities(
        self,
        thread: Any,
        refs: tuple[Any, Any, Any],
        numbers: tuple[Any, ...],
        queries: list[Any],
        softmax: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Computes a tile's softmax: returns maxima and sums, factors of older sums, and weights.

        Args:
            refs: addresses of keys, their scales and the values' scales.
            numbers: position of the tile's first key, kv head's index among ``scale_heads``,
                position of the query tile's first token, number of its tokens.
            queries: registers that ``queries`` loaded.
            softmax: maxima so far, then sums so far over this lane's keys.
        """
        k, k_scale, v_scale = refs
        key0, head, position, tokens = numbers
        g, t = lane_of(thread)
        warp_key = total((warp_of(thread), self.keys // WARPS))
        key = total(warp_key, self._key_in_8(g))
        products = self._products(k, key, g, t, queries)
        scale_at = total((key, 2 * self.scale_heads), (head, 2))
        ahead = self._ahead(t, position, tokens, total(key0, key))
        seen: dict[Any, Any] = {}
        scores: dict[Any, Any] = {}
        for block, half in self._halves():
            offset = KEYS * block + STRIP * half
            scale = load_number(total(k_scale, scale_at), 2 * self.scale_heads * offset, BF16)
            for at in self._columns():
                cell = (block, half, *at)
                seen[cell] = self._is_seen(ahead[at], offset)
                x = self._scaled(products[block, at[0]][2 * half + at[1]], scale)
                scores[cell] = arith.select(seen[cell], x, number(-float("inf")))
        return self._weighed(scores, seen, total(v_scale, scale_at), softmax)

    def _weighed(
        self, scores: dict[Any, Any], seen: dict[Any, Any], v_scale: Any, softmax: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        peaks, sums = softmax[: self.num_softmax], softmax[self.num_softmax :]
        tops, alphas, weights = [], [], {}
        for i, at in enumerate(self._columns()):
            mine = [scores[block, half, *at] for block, half in self._halves()]
            top = over_lanes(functools.reduce(maximum, mine), MAX)
            tops.append(maximum(peaks[i], top))
            alphas.append(exp2(arith.subf(peaks[i], tops[i])))
            sums[i] = arith.mulf(sums[i], alphas[i])
            for block, half in self._halves():
                p = exp2(arith.subf(scores[block, half, *at], tops[i]))
                sums[i] = arith.addf(sums[i], p)
                weights[block, half, *at] = p
        right = []
        for block, half in self._halves():
            offset = 2 * self.scale_heads * (KEYS * block + STRIP * half)
            scale = load_number(v_scale, offset, BF16)
            for strip in range(self.strips):
                cells = [(block, half, strip, e) for e in (0, 1)]
                # What nobody put there may be scaled by anything, even NaN, and 0 * NaN is none.
                pair = [
                    arith.select(seen[c], arith.mulf(weights[c], scale), number(0.0)) for c in cells
                ]
                right.append(_transposed(_both(*pair)))
        return tops + sums, alphas, right

    def _products(self, k: Any, key: Any, g: Any, t: Any, queries: list[Any]) -> dict[Any, Any]:
        """Four numbers for each block of keys and strip of queries."""
        row_bytes, order = self.key_bytes, self.order
        count = order.key_words(row_bytes)
        lanes = 4 // count  # that share 16 bytes
        chunk = arith.divui(t, constant(lanes))
        place = total(k, (key, row_bytes), (self._swizzled(chunk, key, row_bytes), 16))
        place = total(place, (arith.remui(t, constant(lanes)), 4 * count))
        # A row of 128 bytes is read in two halves.
        places = [place, arith.xori(place, constant(64))][: row_bytes // 64 or 1]
        sums = {
            (block, strip): [number(0.0)] * 4
            for block in range(self.blocks)
            for strip in range(self.strips)
        }
        for block in range(self.blocks):
            rows = [
                [
                    word
                    for each in places
                    for word in load_words(each, (KEYS * block + STRIP * half) * row_bytes, count)
                ]
                for half in range(2)
            ]
            for word in range(row_bytes // 16):
                for step in range(order.steps):
                    left = [
                        self.dequantizer.two(row[word], 2 * step + e)
                        for e in (0, 1)
                        for row in rows
                    ]
                    for strip in range(self.strips):
                        at = self.H // 8 * strip + 2 * (word * order.steps + step)
                        sums[block, strip] = self.dequantizer.product(
                            left, queries[at : at + 2], sums[block, strip]
                        )
        return sums

    def add_values(
        self, thread: Any, v: Any, right: list[Any], alphas: list[Any], sums: list[Any]
    ) -> list[Any]:
        """Multiplies older sums by ``alphas`` and adds values times probabilities."""
        g, t = lane_of(thread)
        first = self._first_key(t)
        warp_key = total((warp_of(thread), self.keys // WARPS))
        words = self.value_bytes // 32
        per_chunk = 4 // words  # lanes that share 16 bytes
        places = []
        for key in (first, arith.xori(first, constant(FLIP[self.key_bytes]))):
            chunk = arith.divui(g, constant(per_chunk))
            row = total(v, (total(warp_key, key), self.value_bytes))
            row = total(row, (self._swizzled(chunk, key, self.value_bytes), 16))
            places.append(total(row, (arith.remui(g, constant(per_chunk)), 4 * words)))
        sums = [
            arith.mulf(x, alphas[2 * (i // 4 % self.strips) + i % 2]) for i, x in enumerate(sums)
        ]
        for block in range(self.blocks):
            # Of rows 0 to 7 and 8 to 15: words of each of the lane's two keys.
            loaded = [
                [
                    load_words(place, (KEYS * block + STRIP * half) * self.value_bytes, words)
                    for place in places
                ]
                for half in range(2)
            ]
            self._add_block(loaded, right[2 * self.strips * block :], sums)
        return sums

    def _add_block(self, loaded: list[Any], right: list[Any], sums: list[Any]) -> None:
        order = self.order
        registers = order.value_places(self.V)
        for product in range(len(registers) // 2):
            (word, side, place), _ = registers[2 * product : 2 * product + 2]
            mixed = [
                _permuted(first[word], second[word], order.selection(side))
                for first, second in loaded
            ]
            left = [self.dequantizer.two(x, place + e) for x in mixed for e in (0, 1)]
            for strip in range(self.strips):
                at = 4 * (product * self.strips + strip)
                both = [right[half * self.strips + strip] for half in range(2)]
                sums[at : at + 4] = self.dequantizer.product(left, both, sums[at : at + 4])

    def _swizzled(self, chunk: Any, row: Any, row_bytes: int) -> Any:
        """Swizzled place of 16 bytes in a row."""
        shifted = arith.shrui(row, constant(SWIZZLE_SHIFT[row_bytes]))
        return arith.xori(chunk, arith.andi(shifted, constant(row_bytes // 16 - 1)))

    def _halves(self) -> list[tuple[int, int]]:
        return [(block, half) for block in range(self.blocks) for half in range(2)]

    def _columns(self) -> list[tuple[int, int]]:
        """Strip and number of each query of a lane."""
        return [(strip, e) for strip in range(self.strips) for e in range(2)]

    def _ahead(self, t: Any, position: Any, tokens: Any, key: Any) -> dict[Any, Any]:
        """Distance of each query's token to a key; before all keys where there is no token."""
        ahead = {}
        for strip, e in self._columns():
            mine = position
            if self.tokens > 1:
                row = total((t, 2), constant(STRIP * strip + e))
                token = arith.divui(row, constant(self.span))
                is_there = arith.cmpi(arith.CmpIPredicate.slt, token, tokens)
                mine = arith.select(is_there, total(position, token), constant(2**32 - 1))
            ahead[strip, e] = arith.subi(mine, key)
        return ahead

    def _is_seen(self, ahead: Any, offset: int) -> Any:
        seen = arith.cmpi(arith.CmpIPredicate.sge, ahead, constant(offset))
        if self.spec.window is None:
            return seen
        end = constant(offset + self.spec.window)
        return arith.andi(seen, arith.cmpi(arith.CmpIPredicate.slt, ahead, end))

    def _scaled(self, product: Any, scale: Any) -> Any:
        """A score in units of log2."""
        cap = self.spec.soft_cap
        if cap is None:
            return arith.mulf(product, arith.mulf(scale, number(self.spec.scale * LOG2E)))
        # As ``pallas_kernels.hopper.tile.soft_cap``.
        factor = arith.mulf(scale, number(2.0 * LOG2E * self.spec.scale / cap))
        above = arith.addf(exp2(arith.mulf(product, factor)), number(1.0))
        part = assembly(ir.F32Type.get(), [above], "rcp.approx.ftz.f32 $0, $1;", "=f,f", pure=True)
        return fused(part, number(-2.0 * cap * LOG2E), number(cap * LOG2E))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeResult:
    """Merge of four warps' attention results through shared memory."""

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
        """Merges and normalizes four warps' results, and writes them to global memory.

        Args:
            places: fp32 buffers in shared memory: maxima and sums [2, 4, rows], results
                [4, rows, V + 4].
            results: global-memory addresses of results and logsumexps, i64, and the index of this
                partial result.
            softmax, sums: registers of the last ``CodeTile.probabilities`` and ``add_values``.
            meet: function that waits for all threads of the warpgroup.
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


def lane_of(thread: Any) -> tuple[Any, Any]:
    """Splits a thread's lane number 4 g + t into (g, t)."""
    lane = arith.andi(thread, constant(31))
    return arith.shrui(lane, constant(2)), arith.andi(lane, constant(3))


def warp_of(thread: Any) -> Any:
    """Returns the number of a thread's warp in its warpgroup."""
    return arith.shrui(thread, constant(5))


def _join(low: Any, high: Any) -> Any:
    return arith.ori(low, arith.shli(high, constant(16)))


def _permuted(low: Any, high: Any, selection: int) -> Any:
    text = f"prmt.b32 $0, $1, $2, {selection:#x};"
    return assembly(i32(), [low, high], text, "=r,r,r", pure=True)


def maximum(a: Any, b: Any) -> Any:
    """Returns the larger of two f32 values."""
    return assembly(ir.F32Type.get(), [a, b], MAX, "=f,f,f", pure=True)


def _both(low: Any, high: Any) -> Any:
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return assembly(i32(), [low, high], text, "=r,f,f", pure=True)


def over_lanes(x: Any, text: str) -> Any:
    """Returns the maximum or sum of x over the lanes that hold the same queries."""
    for distance in (4, 8, 16):
        shuffle = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        other = assembly(ir.F32Type.get(), [x], shuffle, "=f,f", pure=False)
        x = assembly(ir.F32Type.get(), [x, other], text, "=f,f,f", pure=True)
    return x


def _transposed(register: Any) -> Any:
    """Transposes a warp's 8 by 8 numbers."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return assembly(i32(), [register], text, "=r,r", pure=False)


def _inverse(x: Any) -> Any:
    """Computes 1 / x, and 0 for 0."""
    text = "rcp.approx.ftz.f32 $0, $1;"
    inverse = assembly(ir.F32Type.get(), [x], text, "=f,f", pure=True)
    is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, x, number(0.0))
    return arith.select(is_zero, number(0.0), inverse)


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
