"""Inverses of the chunks' triangular systems, for all chunks side by side.

Within a chunk the delta rule is a system of 64 equations: the tokens write values beta Y with
``(I + A) Y = V - entered K S`` and ``A[i, j] = decay(i, j) k_i . k_j beta_j`` for j < i. A block
computes ``(I + A)^-1`` of two value heads. K K^T is one WGMMA product. The inverses of the two
diagonal blocks of 32 are found by forward substitution in fp32: each thread of a warp owns a column
in registers, and reads A from shared memory, where all threads want the same number. With X and Z
of these inverses and L of the block below X, the block below X in the whole inverse is ``-Z L X``:
two products by WGMMA, of both heads at once, whose operands are sums of two bf16 and so keep 16
bits. Products of powers of A would need no substitution, but cancel: with 64 equal keys they reach
1e18, and the inverse has entries of 1.

Dims: B batch, T position, N key heads, M value heads, H key width, J chunk.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu, mgpu_utils, plgpu, vector
from pallas_kernels.hopper.thread_registers import ThreadRegisters
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    fused,
    number,
    packed_pair,
    thread,
    total,
    widened_pair,
)
from pallas_kernels.hopper.tile import row_layout, tile_layout, tiled

from .gates import CHUNK, Gate, load_gate, passed

_HALF = CHUNK // 2
_PITCH = _HALF + 8  # numbers per row of a block in shared memory, so that banks do not conflict
_FOUR = 4  # numbers per load from shared memory
_PIECE = 16  # bytes of a store to shared memory
_LINE = 128  # bytes within which pieces are permuted, in tiles [64, 64]
_SHORT = 64  # and in blocks of 32 columns
_BF16 = jnp.dtype(jnp.bfloat16)
_COLUMN = ThreadRegisters(count=_HALF, dtype=jnp.dtype(jnp.float32))


def inverses(k_BTNH: jax.Array, gates: jax.Array) -> jax.Array:
    """Computes bf16 [B, M, J, 64, 64]: element [j, i] is ``((I + A)^-1)[i, j]``.

    Args:
        k_BTNH: bf16, T a multiple of 64, H of 64.
        gates: of ``gates.gates``, of an even number of value heads.
    """
    _, num_values, num_chunks = gates.shape[:3]
    kernel = _Inverses(
        num_keys=k_BTNH.shape[2], num_values=num_values, num_chunks=num_chunks,
        width=k_BTNH.shape[3], dtype=k_BTNH.dtype,
    )  # fmt: skip
    return _launched(kernel, {"k": k_BTNH, "gates": gates}, gates.shape[:3])


def inverses_of(systems: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Computes ``inverses`` of given systems, ``-A`` transposed, fp32 [B, M, J, j, i]."""
    chunks = systems.shape[:3]
    kernel = _Inverses(
        num_keys=1, num_values=chunks[1], num_chunks=chunks[2], width=CHUNK, dtype=dtype,
        are_given=True,
    )  # fmt: skip
    return _launched(kernel, {"systems": systems}, chunks)


def _launched(
    kernel: "_Inverses", operands: dict[str, jax.Array], chunks: tuple[int, ...]
) -> jax.Array:
    batch, num_values, num_chunks = chunks
    shape = (batch, num_values, num_chunks, CHUNK, CHUNK)
    found = launch(
        kernel.run,
        name="delta_inverses",
        operands=operands,
        results={"inverses": jax.ShapeDtypeStruct(shape, kernel.dtype)},
        scratch=kernel.scratch(),
        grid=(batch * num_chunks * num_values // 2,),
        grid_names=("block",),
        num_threads=1,
    )
    return found["inverses"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Inverses:
    """The kernel of one call."""

    num_keys: int
    num_values: int
    num_chunks: int
    width: int
    dtype: jnp.dtype
    are_given: bool = False  # whether the systems are operands

    @property
    def num_products(self) -> int:
        """Number of products K K^T of a block: 1 if its two value heads share a key head."""
        return 1 if self.num_values // self.num_keys % 2 == 0 else 2

    def scratch(self) -> dict[str, Any]:
        keys = plgpu.SMEM(
            (self.num_products, CHUNK, self.width), self.dtype, transforms=tiled(_LINE)
        )
        blocks = plgpu.SMEM((2, 2 * _HALF, _HALF), self.dtype, transforms=tiled(_SHORT))
        beside = plgpu.SMEM((2, _HALF, 2 * _HALF), self.dtype, transforms=tiled(_SHORT))
        return {
            "corners": beside,
            # Keys and systems are read before inverses take their space.
            "shared": plgpu.RefUnion(
                (keys, plgpu.SMEM((2, 2, _HALF, _PITCH), jnp.float32)),
                (
                    plgpu.SMEM((2, CHUNK, CHUNK), self.dtype, transforms=tiled(_LINE)),
                    blocks,
                    beside,
                ),
            ),
            "gates": plgpu.SMEM((2, len(Gate), CHUNK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=1 + self.num_products),
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: loads, products, substitution, stores."""
        block, pairs = lax.axis_index("block"), self.num_values // 2
        (keys, systems), (out, first, second) = smem.shared
        pair, rest = lax.rem(block, pairs), lax.div(block, pairs)
        chunk, b = lax.rem(rest, self.num_chunks), lax.div(rest, self.num_chunks)
        for h, system in enumerate(self._systems(gmem, smem, keys, b, pair, chunk)):
            _write_system(system, systems, smem.corners, h)
        plgpu.commit_smem()
        columns = _substitute(systems)
        plgpu.commit_smem()  # all warps have read what the inverses replace
        _write_inverses(columns, out, first, second)
        plgpu.commit_smem()
        _write_corners(self._corners(first, smem.corners, second), out)
        plgpu.commit_smem()
        for h in range(2):
            plgpu.copy_smem_to_gmem(out.at[h], gmem.inverses.at[b, 2 * pair + h, chunk])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _systems(self, gmem, smem, keys, b, pair, chunk) -> Iterator[jax.Array]:
        """Loads or computes both heads' systems, one after the other."""
        if self.are_given:
            for h in range(2):
                source = gmem.systems.at[b, 2 * pair + h, chunk]
                yield plgpu.load(source, layout=tile_layout(), optimized=False)
            return
        rows, group = pl.ds(chunk * CHUNK, CHUNK), self.num_values // self.num_keys
        for i in range(self.num_products):
            head = lax.div(2 * pair + i, group)
            plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, head], keys.at[i], smem.full)
        heads = pl.ds(2 * pair, 2)
        plgpu.copy_gmem_to_smem(gmem.gates.at[b, heads, chunk], smem.gates, smem.full)
        plgpu.barrier_wait(smem.full)
        for i in range(self.num_products):
            k_smem = keys.at[i]

            def product(acc, k_smem=k_smem):
                plgpu.wgmma(acc, k_smem, k_smem.transpose((1, 0)))
                return plgpu.wgmma_accumulator_load(acc)

            products = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
            for h in range(2) if self.num_products == 1 else (i,):
                yield self._system(smem.gates.at[h], products)

    def _system(self, gates, products: jax.Array) -> jax.Array:
        """Computes ``-A`` transposed of a value head: rows j, columns i."""
        # K K^T is symmetric, so its element [j, i] is that of [i, j].
        beta = load_gate(gates, Gate.BETA, row_layout())
        scale = -lax.broadcast_in_dim(beta, products.shape, [0])
        return products * passed(gates, is_strict=True) * scale

    def _split(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a tile as a sum of two rounded ones."""
        # The upper half of the bits, which are a bf16: rounding and widening would be slower.
        bits = lax.bitcast_convert_type(tile, jnp.int32) & jnp.int32(-(2**16))
        high = lax.bitcast_convert_type(bits, jnp.float32)
        return high.astype(self.dtype), (tile - high).astype(self.dtype)

    def _corners(self, first, corners, second) -> jax.Array:
        """Computes block [0, 1] of both heads' inverses, transposed: fp32 [64, 32].

        Each product has the first head's rows above those of the second one, and a column block
        for each head, of which the other head's are left out.
        """

        def from_left(acc):
            for left, right in _LARGE:
                plgpu.wgmma(acc, first.at[left], corners.at[right])
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc))

        def from_right(acc):
            for left, right in _LARGE:
                plgpu.wgmma(acc, parts[left], second.at[right])
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc))

        square = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
        parts = self._split(_own_columns(pl.run_scoped(from_left, square)))
        return _own_columns(pl.run_scoped(from_right, square))


_LARGE = ((0, 0), (0, 1), (1, 0))
"""Products of parts of a product's operands, without that of both small ones."""


def _write_system(system: jax.Array, systems, corners, head: int) -> None:
    """Writes a head's system: its two diagonal blocks in fp32, and block [0, 1] as two of bf16.

    Args:
        systems: diagonal blocks of both heads, in shared memory.
        corners: blocks [0, 1], side by side: [2, 32, 64].
    """
    tile = tile_layout()

    @plgpu.inline_mgpu(arg_types=(tile, plgpu.RefType(), plgpu.RefType(tiled(_SHORT))))
    def write(_, tile, systems, corners):
        lane, warp = (f(thread(), constant(LANES)) for f in (arith.remui, arith.divui))
        block, half = (f(warp, constant(2)) for f in (arith.divui, arith.remui))
        row = total((half, 16), arith.divui(lane, constant(4)))
        column = arith.muli(arith.remui(lane, constant(4)), constant(2))
        numbers = total((row, _PITCH), column, (block, _HALF * _PITCH))
        start = total(numbers, constant(head * 2 * _HALF * _PITCH))
        place = total(address(systems), (start, 4))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, block, constant(0))
        pairs = list(tile.registers.flat)
        count = len(pairs) // 2
        # A thread has two neighboring numbers in a strip of 8 columns, and two 8 rows below.
        for index in range(count):
            strip, below = divmod(index, 2)
            pair = arith.select(is_first, pairs[index], pairs[count + index])
            offset = 4 * (8 * below * _PITCH + 8 * strip)
            text = f"st.shared.v2.f32 [$0+{offset}], {{$1,$2}};"
            values = [_element(pair, i) for i in range(2)]
            assembly(None, [place, *values], text, "r,f,f,~{memory}", pure=False)
        with mgpu_utils.when(is_first):
            for index in range(count):
                strip, below = divmod(index, 2)
                own = total(row, constant(8 * below))
                line = total(address(corners), _short_line(own, head))
                piece = arith.muli(_short_piece(own, strip), constant(_PIECE))
                pair = [_element(pairs[count + index], i) for i in range(2)]
                for which, word in enumerate(_two_words(pair)):
                    offset = constant(which * _HALF * 2 * _SHORT)
                    at = total(line, piece, (column, 2), offset)
                    assembly(
                        None, [at, word], "st.shared.b32 [$0], $1;", "r,r,~{memory}", pure=False
                    )

    write(system, systems, corners)


def _short_line(row: Any, head: Any) -> Any:
    """Byte offset of a row of a head's 32 columns, side by side with the other head's."""
    head = head if not isinstance(head, int) else constant(head)
    rows = total((arith.divui(row, constant(8)), 16 * _SHORT), (head, 8 * _SHORT))
    return total(rows, (arith.remui(row, constant(8)), _SHORT))


def _short_piece(row: Any, piece: int) -> Any:
    """Returns the place of a piece of 16 bytes in a row of 64 bytes."""
    odd = arith.andi(arith.shrui(row, constant(1)), constant(3))
    return arith.xori(odd, constant(piece))


def _two_words(pair: list[Any]) -> tuple[Any, Any]:
    """Two fp32 numbers as words of two bf16 each, whose sum they are."""
    word = packed_pair(pair, _BF16)
    rest = [arith.subf(x, y) for x, y in zip(pair, widened_pair(word, _BF16), strict=True)]
    return word, packed_pair(rest, _BF16)


def _own_columns(tile: jax.Array) -> jax.Array:
    """Columns of a tile [64, 64] of each head's rows: the first 32 of the first 32 rows, etc."""
    layout = tile_layout()

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((CHUNK, _HALF), jnp.float32, layout=layout),
    )
    def own(_, tile):
        warp, pairs = arith.divui(thread(), constant(LANES)), list(tile.registers.flat)
        is_first = arith.cmpi(arith.CmpIPredicate.ult, warp, constant(2))
        shape, zero = (CHUNK, _HALF), mgpu.c(0.0, ir.F32Type.get())
        like = mgpu.FragmentedArray.splat(zero, shape, layout.to_mgpu()).registers
        registers = np.empty(like.size, object)
        for index in range(like.size):
            registers[index] = arith.select(is_first, pairs[index], pairs[like.size + index])
        return mgpu.FragmentedArray(
            _registers=registers.reshape(like.shape), _layout=tile.layout, _is_signed=None
        )

    return own(tile)


def _write_corners(corners: jax.Array, out) -> None:
    """Writes block [0, 1] of both heads' inverses, [64, 32], to the tiles [64, 64]."""

    @plgpu.inline_mgpu(arg_types=(tile_layout(), plgpu.RefType(tiled(_LINE))))
    def write(_, corners, out):
        lane, warp = (f(thread(), constant(LANES)) for f in (arith.remui, arith.divui))
        head, half = (f(warp, constant(2)) for f in (arith.divui, arith.remui))
        low = arith.divui(lane, constant(4))
        line = total(address(out), (head, CHUNK * _LINE), (half, 16 * _LINE), (low, _LINE))
        line = total(line, (arith.remui(lane, constant(4)), 4))
        for index, pair in enumerate(corners.registers.flat):
            strip, below = divmod(index, 2)
            word = packed_pair([_element(pair, i) for i in range(2)], _BF16)
            piece = arith.xori(low, constant(_LINE // _PIECE // 2 + strip))
            place = total(line, (piece, _PIECE), constant(8 * below * _LINE))
            assembly(None, [place, word], "st.shared.b32 [$0], $1;", "r,r,~{memory}", pure=False)

    write(corners, out)


def _element(pair: Any, which: int) -> Any:
    position = ir.DenseI64ArrayAttr.get([which])
    return vector.extract(pair, dynamic_position=[], static_position=position)


def _substitute(systems) -> jax.Array:
    """Solves the four blocks' systems for a unit matrix: a warp per block, a thread per column."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_COLUMN.array)
    def solve(_, systems):
        warp, column = (f(thread(), constant(LANES)) for f in (arith.divui, arith.remui))
        system = total(address(systems), (warp, 4 * _HALF * _PITCH))
        is_one = arith.CmpIPredicate.eq
        x = [
            arith.select(arith.cmpi(is_one, column, constant(i)), number(1.0), number(0.0))
            for i in range(_HALF)
        ]
        for j in range(_HALF - 1):
            for at in range((j + 1) // _FOUR * _FOUR, _HALF, _FOUR):
                factors = _four(system, 4 * (j * _PITCH + at))
                for i, factor in enumerate(factors, start=at):
                    if i > j:
                        x[i] = fused(factor, x[j], x[i])
        return _COLUMN.wrap(x)

    return solve(systems)


def _four(place: Any, offset: int) -> list[Any]:
    """Loads four fp32 numbers from shared memory."""
    f32 = ir.F32Type.get()
    kind = llvm.StructType.get_literal([f32] * _FOUR)
    text = f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{offset}];"
    found = assembly(kind, [place], text, "=f,=f,=f,=f,r,~{memory}", pure=False)
    return [llvm.extractvalue(f32, found, [i]) for i in range(_FOUR)]


def _write_inverses(columns: jax.Array, out, first, second) -> None:
    """Writes the blocks' inverses, transposed, and zeros beside them.

    Args:
        out: a tile [64, 64] of each head; its block [0, 1] is written later.
        first: two parts of the heads' first blocks, one above the other, [2, 64, 32].
        second: two parts of the heads' second blocks, side by side, [2, 32, 64].
    """
    short = plgpu.RefType(tiled(_SHORT))

    @plgpu.inline_mgpu(arg_types=(_COLUMN.layout, plgpu.RefType(tiled(_LINE)), short, short))
    def write(_, columns, out, first, second):
        warp, lane = (f(thread(), constant(LANES)) for f in (arith.divui, arith.remui))
        head, block = (f(warp, constant(2)) for f in (arith.divui, arith.remui))
        row = total((block, _HALF), lane)
        line = total(address(out), (head, CHUNK * _LINE), (row, _LINE))
        low, zero = arith.remui(row, constant(8)), constant(0)
        above = total(address(first), (head, _HALF * _SHORT), (lane, _SHORT))
        beside = total(address(second), _short_line(lane, head))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, block, zero)
        short = arith.select(is_first, above, beside)
        numbers = _COLUMN.registers(columns)
        pairs = [_two_words(numbers[i : i + 2]) for i in range(0, _HALF, 2)]
        text = "st.shared.v4.b32 [$0], {$1,$2,$3,$4};"

        def store(place, words):
            assembly(None, [place, *words], text, "r,r,r,r,r,~{memory}", pure=False)

        for piece in range(_SHORT // _PIECE):
            high, rest = zip(*pairs[4 * piece : 4 * piece + 4], strict=True)
            for where, words in ((block, high), (arith.subi(constant(1), block), [zero] * 4)):
                at = arith.xori(low, total((where, _SHORT // _PIECE), constant(piece)))
                store(total(line, (at, _PIECE)), words)
            for which, words in enumerate((high, rest)):
                offset = constant(which * 2 * _HALF * _SHORT)
                store(total(short, (_short_piece(lane, piece), _PIECE), offset), words)

    write(columns, out, first, second)
