"""Inputs of a block's products, which its threads compute in fp32 and store in shared memory.

A product split over K writes partial sums of its columns. Every reader of a column adds them
itself, always in the same order, so no extra phase is needed for the sums. A thread handles four
neighboring elements (a quad) at a time, and issues all its reads before it adds.

Dims: D width of the stream, F hidden width.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.each_thread import warp_and_lane
from pallas_kernels.hopper.grid import meet_in_block
from pallas_kernels.hopper.mosaic import arith, mgpu_utils
from pallas_kernels.hopper.threads import (
    address,
    assembly,
    constant,
    from_lane_xor,
    global_place,
    loaded,
    number,
    packed_pair,
    swiglu,
    total,
    widened_pair,
)

from . import peers
from .config import SLICES, THREADS, WorkSplit
from .per_thread import below, thread_anew

_LANE_BITS = (16, 8, 4, 2, 1)
QUAD = 4
"""Neighboring numbers that a thread takes at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Reader of the columns of an earlier product's result in this launch."""

    split: WorkSplit

    def partial_sums(self, parts, column) -> list[list[Any]]:
        """Loads every partial sum of columns ``column`` (a multiple of 4) to ``column + 3``."""
        return [load_quad(parts, at) for at in self._rows(column)]

    def wait(self, parts) -> None:
        """Waits for sums that other devices write; otherwise a barrier came before."""
        if self.split.devices > 1:
            peers.wait_for_units(parts, self.split)

    def arrived(self, found: list[list[Any]], parts, column) -> list[list[Any]]:
        """Waits for those of ``partial_sums`` that other devices have not written."""
        if self.split.devices == 1:
            return found
        places = [global_place(parts, at, 4) for at in self._rows(column)]
        return [peers.arrived(quad, place) for quad, place in zip(found, places, strict=True)]

    def _rows(self, column) -> list[Any]:
        rows = range(self.split.sums)
        return [total(column, constant(row * self.split.N)) for row in rows]


def added(quads: list[list[Any]]) -> list[Any]:
    """Adds quads (four numbers each) elementwise, in their order."""
    return functools.reduce(
        lambda xs, ys: [arith.addf(x, y) for x, y in zip(xs, ys, strict=True)], quads
    )


def load_quad(ref, at) -> list[Any]:
    """Loads four fp32 numbers, from index ``at`` on, from an array that other blocks write."""
    words = loaded("ld.relaxed.gpu.global.v4.b32", global_place(ref, at, 4), QUAD, kind="l")
    return [arith.bitcast(ir.F32Type.get(), word) for word in words]


def quads(count: int) -> list[Any]:
    """Returns the indices of this thread's quads; excess threads repeat the last quad."""
    mine = thread_anew()
    return [
        arith.minui(total(mine, constant(first)), constant(count - 1))
        for first in range(0, count, THREADS)
    ]


def put_hidden(parts, x: "Rows", block, split: WorkSplit, gates_and_ups: WorkSplit) -> None:
    """Computes the MLP's hidden values that this block multiplies, into shared memory."""
    columns = Columns(split=gates_and_ups)
    for quad in quads(split.most_rows // QUAD):
        at, gate = place_of(quad, block, split)
        both = (gate, total(gate, constant(split.K)))
        loads = [columns.partial_sums(parts, c) for c in both]
        gates, ups = map(added, loads)
        x.store(at, [swiglu(*both) for both in zip(gates, ups, strict=True)])


def put_normed(
    own, parts, stream, scale, squares_smem, x: "Rows", block, *, row: int, split: WorkSplit | None,
    norm: RmsNorm, blocks: int, dtype: jnp.dtype,
) -> None:  # fmt: skip
    """Stores ``norm(x)`` in shared memory, and this block's part of x in the residual stream.

    Args:
        own: x in 16 bits; read only before the first product, where ``split`` is None.
        parts, split: partial sums of a product and its division; x is their sum plus the stream's
            other row.
        stream: two rows of the residual stream, fp32 [2, D], used alternately.
        squares_smem: fp32 [warps], for warps' sums of squares.
        scale: the layer's norm scale; ``norm`` may hold all layers' scales.
        row: index of the stream row that is written.
    """
    width = norm.scale.shape[-1]
    mine = quads(width // QUAD)
    partial_sums, columns = [], None if split is None else Columns(split=split)
    if columns is not None:
        columns.wait(parts)
    for quad in mine:
        at = total((quad, QUAD))
        if columns is None:
            partial_sums.append([widened(halves(own, at), dtype)])
        else:
            before = load_quad(stream, total(at, constant((1 - row) * width)))
            partial_sums.append([before, *columns.partial_sums(parts, at)])
    scales = [_scales(scale, total((quad, QUAD)), norm) for quad in mine]
    if columns is not None:
        partial_sums = [
            [before, *columns.arrived(found, parts, total((quad, QUAD)))]
            for quad, (before, *found) in zip(mine, partial_sums, strict=True)
        ]
    rows, square = [added(each) for each in partial_sums], number(0.0)
    for i, found in enumerate(rows):
        first = total(mgpu_utils.thread_idx(), constant(i * THREADS))
        is_first = below(first, constant(width // QUAD))
        for each in found:
            squared = arith.mulf(each, each)
            square = arith.addf(square, arith.select(is_first, squared, number(0.0)))
    each_block = constant(-(-width // QUAD // blocks))
    for quad, found in zip(mine, rows, strict=True):
        owner = arith.divui(quad, each_block)
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, owner, block)):
            place = global_place(stream, total((quad, QUAD), constant(row * width)), 4)
            text = "st.global.v4.f32 [$0], {$1,$2,$3,$4};"
            assembly(None, [place, *found], text, "l,f,f,f,f", pure=False)
    factor = _factor(square, squares_smem, width, norm)
    for quad, found, each in zip(mine, rows, scales, strict=True):
        normed = [arith.mulf(arith.mulf(n, factor), s) for n, s in zip(found, each, strict=True)]
        x.store(total((quad, QUAD)), normed)


def write_result(parts, stream, y, block, *, row: int, split: WorkSplit, dtype: jnp.dtype) -> None:
    """Writes this block's quads of the result: residual stream plus product, rounded once."""
    columns = Columns(split=split)
    columns.wait(parts)
    count = split.N // QUAD
    each = -(-count // split.blocks)
    assert each <= THREADS, "a thread has a quad"
    mine = mgpu_utils.thread_idx()
    quad = total((block, each), mine)
    with mgpu_utils.when(arith.andi(below(mine, constant(each)), below(quad, constant(count)))):
        at = total((quad, QUAD))
        before = load_quad(stream, total(at, constant(row * split.N)))
        found = columns.arrived(columns.partial_sums(parts, at), parts, at)
        found = added([before, *found])
        words = [packed_pair(found[i : i + 2], dtype) for i in (0, 2)]
        place = global_place(y, at, 2)
        assembly(None, [place, *words], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r", pure=False)


def place_of(quad, block, split: WorkSplit) -> tuple[Any, Any]:
    """Returns a quad's offset in the block's input in shared memory, and its index along K."""
    per_unit = constant(split.rows // QUAD)
    unit = total(block, (arith.divui(quad, per_unit), split.blocks))
    unit = arith.minui(unit, constant(split.units - 1))
    part = arith.divui(unit, constant(split.across))
    return total((quad, QUAD)), total((part, split.rows), (arith.remui(quad, per_unit), QUAD))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The input rows of products in shared memory: fp32, or 16 bits if weights are quantized."""

    smem: Any
    packed: jnp.dtype | None

    @property
    def size(self) -> int:
        """Number of bytes per element."""
        return 4 if self.packed is None else 2

    def store(self, at, numbers: list[Any]) -> None:
        """Stores four fp32 numbers from index ``at`` on, rounded to 16 bits if ``packed``."""
        if self.packed is None:
            store_quad(self.smem, at, numbers)
            return
        words = [packed_pair(numbers[i : i + 2], self.packed) for i in (0, 2)]
        place = total(address(self.smem), (at, 2))
        assembly(None, [place, *words], "st.shared.v2.b32 [$0], {$1,$2};", "r,r,r", pure=False)


def store_quad(x_smem, at, numbers: list[Any]) -> None:
    """Stores four fp32 numbers to ``x_smem`` from index ``at`` on."""
    place = total(address(x_smem), (at, 4))
    text = "st.shared.v4.f32 [$0], {$1,$2,$3,$4};"
    assembly(None, [place, *numbers], text, "r,f,f,f,f", pure=False)


def halves(ref, at) -> list[Any]:
    """Loads four 16-bit numbers, from index ``at`` on, from an array that no block writes."""
    return loaded("ld.global.nc.v2.b32", global_place(ref, at, 2), 2, kind="l")


def widened(words: list[Any], dtype: jnp.dtype) -> list[Any]:
    """Converts packed 16-bit numbers to fp32."""
    return [x for word in words for x in widened_pair(word, dtype)]


def _scales(scale, at, norm: RmsNorm) -> list[Any]:
    """Four of the norm's, with what is added to each."""
    dtype = jnp.dtype(norm.scale.dtype)
    if dtype == jnp.float32:
        words = loaded("ld.global.nc.v4.b32", global_place(scale, at, 4), QUAD, kind="l")
        found = [arith.bitcast(ir.F32Type.get(), word) for word in words]
    else:
        found = widened(halves(scale, at), dtype)
    return [arith.addf(x, number(norm.offset)) for x in found] if norm.offset else found


def _factor(square, squares_smem, count: int, norm: RmsNorm) -> Any:
    """One over the root of the mean of all threads' squares."""
    for bit in _LANE_BITS:
        square = arith.addf(square, from_lane_xor(square, bit))
    warp, lane = warp_and_lane()
    with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
        place = total(address(squares_smem), (warp, 4))
        assembly(None, [place, square], "st.shared.f32 [$0], $1;", "r,f", pure=False)
    meet_in_block(THREADS)
    words = [
        word
        for i in range(0, SLICES, QUAD)
        for word in loaded("ld.shared.v4.b32", address(squares_smem), QUAD, kind="r", offset=4 * i)
    ]
    found = functools.reduce(arith.addf, [arith.bitcast(ir.F32Type.get(), w) for w in words])
    mean = arith.addf(arith.mulf(found, number(1.0 / count)), number(norm.epsilon))
    return assembly(ir.F32Type.get(), [mean], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", pure=True)
