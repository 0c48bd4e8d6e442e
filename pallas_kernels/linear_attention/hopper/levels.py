"""Tiles of a chunk's tokens and pairs by levels of blocks, for a decay per channel of the keys.

Registers of tiles are as WGMMA leaves them: in each strip of 8 columns a thread has two neighboring
numbers of a row, and two of the row eight below.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import arith, mgpu, plgpu, vector
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    exp2,
    from_lane_xor,
    i32,
    loaded,
    thread,
    total,
)
from pallas_kernels.hopper.tile import STRIP, column_layout, row_layout, tile_layout, tiled

from .gates import CHUNK

HALVES = (32, 16, 8, 4)  # half a block of each level, as in ``channels``
LAST = HALVES[-1]

type TokenRow = Callable[[Any], Any]  # a row of sums, of a token's row in the chunk


def of_level(weights: jax.Array, half: int) -> jax.Array:
    """Weights of the pairs that part at a level; of the last level, of all that are left."""

    def is_here(row, strip):
        apart = arith.xori(arith.shrui(row, constant(3)), constant(strip))
        if half == LAST:
            return _is("eq", apart, constant(0))
        return _is("eq", arith.shrui(apart, constant(half.bit_length() - 4)), constant(1))

    return _by_strip(weights, is_here)


def _by_strip(tile: jax.Array, is_kept: Callable[[Any, int], Any]) -> jax.Array:
    """Keeps the strips of 8 columns of some rows of a tile [64, 64], and makes the others 0.

    Args:
        is_kept: of a row and a strip's number; rows 8 apart at least may differ.
    """
    layout = tile_layout()

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=layout),
    )
    def keep(_, tile):
        registers = np.empty(tile.registers.size, object)
        first, _ = _place()
        for at, pair in enumerate(tile.registers.flat):
            strip, below = divmod(at, 2)
            element = ir.FloatAttr.get(ir.VectorType(pair.type).element_type, 0.0)
            zero = arith.constant(pair.type, ir.DenseElementsAttr.get_splat(pair.type, element))
            kept = is_kept(total(first, constant(8 * below)), strip)
            registers[at] = arith.select(kept, pair, zero)
        return _tile(tile, registers)

    return keep(tile)


def seen(products: jax.Array, first: jax.Array, *, by_reader: bool) -> jax.Array:
    """Keeps the products of tokens i that see earlier tokens j, as ``gates.passed``.

    Args:
        first: ``Gate.FIRST`` of tokens i: of rows if ``by_reader``, else of columns.
    """
    layout = tile_layout()
    of_first = row_layout() if by_reader else column_layout()

    @plgpu.inline_mgpu(
        arg_types=(layout, of_first),
        return_type=plgpu.ShapeDtypeStruct(products.shape, jnp.float32, layout=layout),
    )
    def keep(_, products, first):
        firsts = first.broadcast_in_dim(products.shape, (0 if by_reader else 1,), products.layout)

        def is_seen(row, column, at, which):
            i, j = (row, column) if by_reader else (column, row)
            begin = arith.fptosi(i32(), _element(firsts.registers.flat[at], which))
            return arith.andi(_is("slt", j, i), _is("sge", j, begin))

        return _kept(products, is_seen)

    return keep(products, first)


def diagonal(products: jax.Array) -> jax.Array:
    """The diagonal of [64, 64] products, by row."""
    layout = tile_layout()

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(products.shape, jnp.float32, layout=layout),
    )
    def keep(_, products):
        return _kept(products, lambda row, column, *_: _is("eq", row, column))

    return jnp.sum(keep(products), axis=1)


def triangle() -> jax.Array:
    """Ones from the diagonal of a [64, 64] tile on, else zeros, in fp32."""
    layout, shape = tile_layout(), (CHUNK, CHUNK)

    @plgpu.inline_mgpu(
        arg_types=(), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    )
    def ones(_):
        one = mgpu.FragmentedArray.splat(mgpu.c(1.0, ir.F32Type.get()), shape, layout.to_mgpu())
        return _kept(one, lambda row, column, *_: _is("sge", column, row))

    return ones()


def _kept(tile: Any, is_kept: Callable[[Any, Any, int, int], Any]) -> Any:
    """Keeps elements of an fp32 tile by row, column, register and place in it; others become 0."""
    registers, zero = np.empty(tile.registers.size, object), mgpu.c(0.0, ir.F32Type.get())
    first, column = _place()
    for at, pair in enumerate(tile.registers.flat):
        strip, below = divmod(at, 2)
        row, numbers = total(first, constant(8 * below)), []
        for which in range(2):
            kept = is_kept(row, total(column, constant(8 * strip + which)), at, which)
            numbers.append(arith.select(kept, _element(pair, which), zero))
        registers[at] = vector.from_elements(pair.type, numbers)
    return _tile(tile, registers)


def _place() -> tuple[Any, Any]:
    """The row of a thread's first element of a tile, and its column.

    They are read again at each use. Else the compiler would compute all that depends on them ahead
    of the loop over items, and would not have the registers to keep it.
    """
    number = assembly(i32(), [], "mov.u32 $0, %tid.x;", "=r", pure=False)
    lane = arith.andi(number, constant(LANES - 1))
    warp = arith.andi(arith.shrui(number, constant(5)), constant(3))
    row = total((warp, 16), arith.shrui(lane, constant(2)))
    return row, arith.muli(arith.andi(lane, constant(3)), constant(2))


def _is(how: str, x: Any, y: Any) -> Any:
    return arith.cmpi(getattr(arith.CmpIPredicate, how), x, y)


def _element(pair: Any, which: int) -> Any:
    position = ir.DenseI64ArrayAttr.get([which])
    return vector.extract(pair, dynamic_position=[], static_position=position)


def _tile(like: Any, registers: np.ndarray) -> Any:
    return mgpu.FragmentedArray(
        _registers=registers.reshape(like.registers.shape), _layout=like.layout, _is_signed=None
    )


class Move(NamedTuple):
    """Between which tokens of a chunk each row of a tile decays."""

    end: TokenRow
    start: TokenRow | None  # None: the chunk's beginning
    below: tuple[int, ...] = (0, 1)  # which of a thread's two rows decay
    is_shared: bool = False  # whether they decay alike


def own(row: Any) -> Any:
    """The token's own row."""
    return row


def middle(half: int) -> TokenRow:
    """Last token in the first half of a token's block of ``2 half``."""
    return lambda row: total(arith.andi(row, constant(-2 * half)), constant(half - 1))


def _reader(half: int) -> TokenRow:
    """Last token before a token's block of ``half``, or the chunk's first."""

    def place(row):
        before = arith.subi(arith.andi(row, constant(-half)), constant(1))
        return arith.maxsi(before, constant(0))

    return place


def _writer(half: int) -> TokenRow:
    """Last token of a token's block of ``half``."""
    return lambda row: arith.ori(row, constant(half - 1))


def reading(half: int) -> Move:
    """Returns how sums of tokens that read decay before a level's product."""
    if half == HALVES[0]:
        return Move(_reader(half), None, is_shared=True)
    if half == LAST:
        return Move(middle(half), _reader(2 * half))
    # Blocks of 8 tokens are one of a thread's rows: the first one has its block's place already.
    below = (0, 1) if half > STRIP else (1,)
    return Move(_reader(half), _reader(2 * half), below, is_shared=half > STRIP)


def writing(half: int) -> Move:
    """Returns how sums of tokens that write decay before a level's product."""
    if half == LAST:
        return Move(_writer(2 * half), middle(half))
    below = (0, 1) if half > STRIP else (0,)
    return Move(_writer(2 * half), _writer(half), below, is_shared=half > STRIP)


KEPT = Move(_writer(CHUNK), own)
"""Tokens that write decay to the chunk's end."""
READ = Move(own, middle(LAST))
"""Sums of tokens that read decay so after the last level's product."""
WRITTEN = Move(middle(LAST), own)
"""Sums of tokens that write decay so after the last level's product."""


def between(half: int) -> Move:
    """Returns how both tokens of a level's pairs decay, up to the place between them."""
    place = middle(half)

    def of(choose: Callable) -> TokenRow:
        return lambda row: choose(row, place(row))

    return Move(of(arith.maxsi), of(arith.minsi))


def decay(sums, move: Move, *, first: int, count: int) -> jax.Array:
    """Computes ``2^(sums[end(row)] - sums[start(row)])``, fp32 [64, count].

    Args:
        sums: fp32 [64, H] in shared memory, tiled and swizzled by 128 bytes.
        first: the first of the ``count`` channels.
    """
    layout, shape = tile_layout(), (CHUNK, count)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled(128, 4)),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def find(_, sums):
        one = mgpu.FragmentedArray.splat(mgpu.c(1.0, ir.F32Type.get()), shape, layout.to_mgpu())
        return _decayed(one, sums, move, first)

    return find(sums)


def scaled(tile: jax.Array, sums, move: Move, *, first: int = 0) -> jax.Array:
    """Multiplies an fp32 tile of 64 rows by ``decay``."""
    layout = tile_layout()

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(tiled(128, 4))),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=layout),
    )
    def scale(_, tile, sums):
        return _decayed(tile, sums, move, first)

    return scale(tile, sums)


def _decayed(tile: Any, sums: Any, move: Move, first: int) -> Any:
    base, (top, column) = address(sums), _place()
    registers, rows = np.array(list(tile.registers.flat), object), (move.end, move.start)
    for below in move.below[:1] if move.is_shared else move.below:
        row = total(top, constant(8 * below))
        places = [_pieces(base, place(row), column) for place in rows if place]
        for strip in range(tile.shape[1] // STRIP):
            offset = 1024 * (first // 32 + strip // 4)
            logs, *starts = [_pair(each[strip % 4], offset) for each in places]
            for start in starts:
                logs = [arith.subf(x, y) for x, y in zip(logs, start, strict=True)]
            factors = [exp2(x) for x in logs]
            for which in move.below if move.is_shared else (below,):
                at = 2 * strip + which
                pair = registers[at]
                numbers = [arith.mulf(_element(pair, i), x) for i, x in enumerate(factors)]
                registers[at] = vector.from_elements(pair.type, numbers)
    for at in [i for i in range(registers.size) if i % 2 not in move.below]:
        # Numbers that went on from one product's accumulator to the next one's beside others that
        # do not would serialize all products.
        numbers = [_copied(_element(registers[at], i)) for i in range(2)]
        registers[at] = vector.from_elements(registers[at].type, numbers)
    return _tile(tile, registers)


def _copied(x: Any) -> Any:
    return assembly(ir.F32Type.get(), [x], "mov.b32 $0, $1;", "=f,f", pure=False)


def add_columns(tile: jax.Array, sums, *, first: int) -> None:
    """Writes each warp's sums of the columns of a tile [64, 64] to shared memory.

    Args:
        sums: a buffer of 128 fp32 numbers for each of four warps.
        first: the tile's first channel.
    """

    @plgpu.inline_mgpu(arg_types=(tile_layout(), plgpu.RefType(tiled(128))))
    def add(_, tile, sums):
        row, column = _place()
        numbers = [
            arith.addf(*(_element(tile.registers.flat[2 * strip + i], which) for i in range(2)))
            for strip in range(tile.shape[1] // STRIP)
            for which in range(2)
        ]
        # A lane gives half of its strips to the lane that keeps them.
        strip = constant(0)
        for distance in (16, 8, 4):
            bit = arith.andi(row, constant(distance // 4))
            is_upper, half = _is("ne", bit, constant(0)), len(numbers) // 2
            pairs = list(zip(numbers[:half], numbers[half:], strict=True))
            numbers = [
                arith.addf(
                    arith.select(is_upper, upper, lower),
                    from_lane_xor(arith.select(is_upper, lower, upper), distance),
                )
                for lower, upper in pairs
            ]
            strip = total((strip, 2), arith.shrui(bit, constant(distance.bit_length() - 3)))
        warp = arith.shrui(row, constant(4))
        place = total(address(sums), (warp, 512), (strip, 4 * STRIP), (column, 4))
        text = f"st.shared.v2.f32 [$0+{4 * first}], {{$1,$2}};"
        assembly(None, [place, *numbers], text, "r,f,f,~{memory}", pure=False)

    add(tile, sums)


def add_warps(sums, totals) -> None:
    """Adds the four warps' sums of ``add_columns`` to 128 numbers in shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled(128)), plgpu.RefType()))
    def add(_, sums, totals):
        f32, own = ir.F32Type.get(), arith.muli(thread(), constant(4))
        place, source = total(address(totals), own), total(address(sums), own)
        text, kinds = "ld.shared.f32 $0, [$1];", "=f,r,~{memory}"
        number = assembly(f32, [place], text, kinds, pure=False)
        for warp in range(WARPS):
            at = total(source, constant(512 * warp))
            number = arith.addf(number, assembly(f32, [at], text, kinds, pure=False))
        assembly(None, [place, number], "st.shared.f32 [$0], $1;", "r,f,~{memory}", pure=False)

    add(sums, totals)


def _pieces(base: Any, row: Any, column: Any) -> list[Any]:
    """Addresses of a thread's two numbers in the first four strips of 8 columns of a row."""
    low = arith.andi(row, constant(7))
    line = total(base, (arith.shrui(row, constant(3)), 4096), (low, 128))
    line = total(line, (arith.andi(column, constant(2)), 4))
    second = arith.shrui(column, constant(2))
    pieces = (arith.xori(low, total(second, constant(2 * strip))) for strip in range(4))
    return [total(line, (piece, 16)) for piece in pieces]


def _pair(place: Any, offset: int) -> list[Any]:
    """Loads two neighboring fp32 numbers from shared memory."""
    words = loaded("ld.shared.v2.b32", place, 2, kind="r", offset=offset)
    return [arith.bitcast(ir.F32Type.get(), word) for word in words]
