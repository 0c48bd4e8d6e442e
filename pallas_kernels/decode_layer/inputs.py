"""What the threads of a block put into shared memory before a product, in fp32.

Products leave parts of their columns, and whoever reads a column adds them in the order of blocks:
so no phase is there for sums alone. A thread takes four neighboring numbers at a time, and asks for
all that it reads before it adds.

Dims: D width of the stream, F hidden width.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.common.row_inputs import RmsNorm
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

from .config import DEPTH, SLICES, THREADS, Share
from .parts import QUAD, Columns
from .per_thread import below, warp_and_lane

_LANE_BITS = (16, 8, 4, 2, 1)


def quads(count: int, *, threads: int = THREADS) -> list[Any]:
    """This thread's quads of so many; threads beyond the last one have it once more."""
    mine = mgpu_utils.thread_idx()
    return [
        arith.minui(total(mine, constant(first)), constant(count - 1))
        for first in range(0, count, threads)
    ]


def put_rows(source, x_smem, start, stop, share: Share, *, dtype: jnp.dtype) -> None:
    """Numbers of an array [K], those that the block's tiles are multiplied with."""
    places = [place_of(quad, start, stop, share) for quad in quads(most_quads(share))]
    asked = [halves(source, k) for _, k in places]
    for (at, _), words in zip(places, asked, strict=True):
        store_quad(x_smem, at, widened(words, dtype))


def put_hidden(parts, x_smem, start, stop, share: Share, gates_and_ups: Share) -> None:
    """Hidden values of what the block's tiles are multiplied with."""
    columns = Columns(share=gates_and_ups)
    places = [place_of(quad, start, stop, share) for quad in quads(most_quads(share))]
    pairs = [(k, total(k, constant(share.K))) for _, k in places]
    asked = [[columns.asked(parts, column) for column in pair] for pair in pairs]
    for (at, _), pair, words in zip(places, pairs, asked, strict=True):
        gates, ups = (columns.added(w, c) for w, c in zip(words, pair, strict=True))
        store_quad(x_smem, at, [swiglu(*both) for both in zip(gates, ups, strict=True)])


def put_normed(
    x, parts, scale, squares_smem, x_smem, share: Share | None, norm: RmsNorm, *, dtype: jnp.dtype
) -> None:
    """``norm(x + product)``, all of it.

    Args:
        parts, share: of the product; None: ``norm(x)``.
        squares_smem: fp32 [warps].
    """
    count = norm.scale.shape[0] // QUAD
    places = [total((quad, QUAD)) for quad in quads(count)]
    columns = None if share is None else Columns(share=share)
    asked = [(halves(x, at), [] if columns is None else columns.asked(parts, at)) for at in places]
    scales = [_scales(scale, at, norm) for at in places]
    rows, square = [], number(0.0)
    for i, (at, (own, words)) in enumerate(zip(places, asked, strict=True)):
        found = widened(own, dtype)
        if columns is not None:
            found = _sums(found, columns.added(words, at))
        rows.append(found)
        is_mine = below(total(mgpu_utils.thread_idx(), constant(i * THREADS)), constant(count))
        for each in found:
            squared = arith.mulf(each, each)
            square = arith.addf(square, arith.select(is_mine, squared, number(0.0)))
    factor = _factor(square, squares_smem, count * QUAD, norm)
    for at, row, each in zip(places, rows, scales, strict=True):
        normed = [arith.mulf(arith.mulf(x, factor), s) for x, s in zip(row, each, strict=True)]
        store_quad(x_smem, at, normed)


def write_sums(residual, sources: list[tuple[Any, Share]], out, block, *, dtype: jnp.dtype) -> None:
    """``residual`` and all products added, rounded once: the block's quads of the result."""
    share = sources[0][1]
    count = share.N // QUAD
    each = -(-count // share.blocks)
    assert each <= THREADS, "a thread has a quad"
    mine = mgpu_utils.thread_idx()
    quad = total((block, each), mine)
    is_mine = arith.andi(below(mine, constant(each)), below(quad, constant(count)))
    with mgpu_utils.when(is_mine):
        at = total((quad, QUAD))
        x = halves(residual, at)
        asked = [(Columns(share=s), Columns(share=s).asked(parts, at)) for parts, s in sources]
        found = widened(x, dtype)
        for columns, words in asked:
            found = _sums(found, columns.added(words, at))
        words = [packed_pair(found[i : i + 2], dtype) for i in (0, 2)]
        place = global_place(out, at, 2)
        assembly(None, [place, *words], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r", pure=False)


def halves(ref, at) -> list[Any]:
    """Four 16-bit numbers of an array that no block writes."""
    return loaded("ld.global.nc.v2.b32", global_place(ref, at, 2), 2, kind="l")


def widened(words: list[Any], dtype: jnp.dtype) -> list[Any]:
    """16-bit numbers as fp32."""
    return [x for word in words for x in widened_pair(word, dtype)]


def most_quads(share: Share) -> int:
    """Of what a block's tiles are multiplied with, at most."""
    return share.most * DEPTH // QUAD


def place_of(quad, start, stop, share: Share) -> tuple[Any, Any]:
    """Of a quad of what a block's tiles are multiplied with: where it goes, and its row of K."""
    per_tile = constant(DEPTH // QUAD)
    tile = arith.minui(total(start, arith.divui(quad, per_tile)), total(stop, constant(-1)))
    down = arith.remui(tile, constant(share.down))
    return total((quad, QUAD)), total((down, DEPTH), (arith.remui(quad, per_tile), QUAD))


def store_quad(x_smem, at, numbers: list[Any]) -> None:
    """Four fp32 numbers to ``x_smem``, from number ``at`` on."""
    place = total(address(x_smem), (at, 4))
    text = "st.shared.v4.f32 [$0], {$1,$2,$3,$4};"
    assembly(None, [place, *numbers], text, "r,f,f,f,f", pure=False)


def _sums(xs: list[Any], ys: list[Any]) -> list[Any]:
    return [arith.addf(x, y) for x, y in zip(xs, ys, strict=True)]


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
