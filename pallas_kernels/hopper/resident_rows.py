"""A few rows of x, loaded into shared memory by the warpgroup that multiplies them.

The rows are stored unchanged, after RMSNorm, or after SwiGLU of their halves. This takes a few
hundred cycles while the weight is being loaded, and replaces a kernel before the product.

Dims: M row of x, K contracted.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.common.row_inputs import RmsNorm

from .machine import LANES, WARPGROUP, WARPS
from .mosaic import arith, llvm, mgpu, mgpu_utils, plgpu
from .threads import (
    address,
    assembly,
    constant,
    from_lane_xor,
    global_place,
    loaded,
    number,
    packed_pair,
    swiglu,
    thread,
    total,
    widened_pair,
)

MOST_ROWS = 8
DEPTH = 128  # of K, in a turn
CHUNK = 8  # numbers in 16 bytes
CHUNKS = DEPTH // CHUNK
_ACROSS = 8  # chunks that are permuted together
_EARLY = 4  # chunks of a thread that are read at once


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResidentRows:
    """Loader of the columns of x that a warpgroup multiplies: every ``groups``-th chunk of 128."""

    M: int
    K: int
    dtype: jnp.dtype
    steps: int  # chunks of 128 columns in the block's part of K
    groups: int = 1  # warpgroups that multiply alternate chunks
    places: int = MOST_ROWS  # rows for which shared memory has space
    norm: RmsNorm | None = None  # applied to each row first
    gated: bool = False  # x is [M, 2 K], gates first: silu(gate) * up is multiplied

    @property
    def turns(self) -> int:
        """Largest number of chunks of 128 columns that one warpgroup loads."""
        return -(-self.steps // self.groups)

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory buffers by name that RMSNorm of x needs; {} without a norm."""
        if self.norm is None:
            return {}
        return {"squares": plgpu.SMEM((self.groups, MOST_ROWS, WARPS), jnp.float32)}

    def operands(self) -> dict[str, jax.Array]:
        """Returns the kernel's operands, by name, that RMSNorm of x needs; {} without a norm."""
        if self.norm is None:
            return {}
        # A vector of K numbers: as many bytes as a row of x, or twice as many.
        return {"norm_scale": self.norm.scale}

    def place(
        self, gmem, smem, x_smem: Any, first: jax.Array, group: jax.Array, *, transforms=()
    ) -> None:
        """Stores this warpgroup's columns of x, after norm or SwiGLU, in shared memory, and waits.

        In each 64 columns of row m, the c-th 8 columns are stored at position ``c xor m``, WGMMA's
        128-byte swizzle, so that ``ldmatrix`` reads different banks. Rows beyond those of x are not
        written, as they affect no other row's sums.

        Args:
            x_smem: [``turns``, 2 halves of 128 columns, ``places``, 64], possibly with dims of 1
                between.
            first: index of the block's first chunk of 128 columns of x.
            group: this warpgroup's index: it loads chunks ``group``, ``group + groups``, ... of the
                block.
            transforms: tiling and swizzle of ``x_smem``.
        """
        refs = [gmem.x, x_smem]
        if self.norm is not None:
            refs += [gmem.norm_scale, smem.squares.at[group]]
        splat = plgpu.Layout.WG_SPLAT(())
        kinds = [plgpu.RefType(), plgpu.RefType(transforms), *[plgpu.RefType()] * (len(refs) - 2)]

        @plgpu.inline_mgpu(arg_types=(splat, splat, *kinds))
        def put(ctx, first, group, x, target, *of_norm):
            del ctx
            self.put(first.registers.flat[0], group.registers.flat[0], x, target, *of_norm)
            mgpu.warpgroup_barrier()

        put(*(jnp.broadcast_to(x, ()) for x in (first, group)), *refs)

    def put(self, first, group, x, target, scale=None, squares=None) -> None:
        """Does one thread's part of ``place``."""
        pieces = self.turns * self.M * CHUNKS
        # Threads beyond the last piece write that piece once more.
        places = [
            self._place_of(arith.minui(total(thread(), constant(start)), constant(pieces - 1)))
            for start in range(0, pieces, WARPGROUP)
        ]

        def read(place: _Place) -> list[list[Any]]:
            stage = total(group, (place.turn, self.groups))
            stage = arith.minui(stage, constant(self.steps - 1))
            k = total((total(first, stage), DEPTH), (place.chunk, CHUNK))
            row = total((place.m, 2 * self.K if self.gated else self.K), k)
            found = [_chunk(x, row)]
            if self.gated:
                found.append(_chunk(x, total(row, constant(self.K))))
            if scale is not None:
                found += self._scale_words(scale, k)
            return found

        # Read before the rows' squares are known, which takes as long again.
        early = [read(place) for place in places[:_EARLY]]
        if squares is not None:
            self._add_squares(x, squares)
            mgpu.warpgroup_barrier()
        for i, place in enumerate(places):
            words = self._made(early[i] if i < _EARLY else read(place), place.m, squares)
            at = total(
                address(target),
                (place.turn, 2 * DEPTH * self.places),
                (arith.divui(place.chunk, constant(_ACROSS)), 2 * CHUNK * _ACROSS * self.places),
                (place.m, 2 * CHUNK * _ACROSS),
                (arith.xori(arith.remui(place.chunk, constant(_ACROSS)), place.m), 2 * CHUNK),
            )
            text = "st.shared.v4.b32 [$0], {$1,$2,$3,$4};"
            assembly(None, [at, *words], text, "r,r,r,r,r", pure=False)

    def _place_of(self, piece) -> "_Place":
        chunk, rest = (f(piece, constant(CHUNKS)) for f in (arith.remui, arith.divui))
        turn, m = (f(rest, constant(self.M)) for f in (arith.divui, arith.remui))
        return _Place(turn=turn, m=m, chunk=chunk)

    def _made(self, read: list[list[Any]], m, squares) -> list[Any]:
        """Returns four words of the product's operand, made from four words of x."""
        if self.gated:
            words = []
            for both in zip(*read, strict=True):
                pairs = (widened_pair(word, self.dtype) for word in both)
                hidden = [swiglu(*each) for each in zip(*pairs, strict=True)]
                words.append(packed_pair(hidden, self.dtype))
            return words
        x, *scale = read
        if self.norm is None:
            return x
        factor, scales, words = self._factor(squares, m), self._scales(scale), []
        for i, word in enumerate(x):
            pair = [arith.mulf(each, factor) for each in widened_pair(word, self.dtype)]
            pair = [arith.mulf(each, scales[2 * i + e]) for e, each in enumerate(pair)]
            words.append(packed_pair(pair, self.dtype))
        return words

    def _factor(self, squares, m) -> Any:
        """Returns one over the root of a row's mean square."""
        assert self.norm is not None
        f32 = ir.F32Type.get()
        found = assembly(
            llvm.StructType.get_literal([f32] * WARPS),
            [total(address(squares), (m, 4 * WARPS))],
            "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];",
            "=f,=f,=f,=f,r",
            pure=False,
        )
        parts = [llvm.extractvalue(f32, found, [i]) for i in range(WARPS)]
        mean = arith.mulf(functools.reduce(arith.addf, parts), number(1.0 / self.K))
        mean = arith.addf(mean, number(self.norm.epsilon))
        return assembly(f32, [mean], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", pure=True)

    def _scale_words(self, scale, k) -> list[list[Any]]:
        """Loads the norm's scales of columns k to k + 7."""
        assert self.norm is not None
        size = self.norm.scale.dtype.itemsize
        return [_chunk(scale, total(k, constant(4 * i)), size=size) for i in range(size // 2)]

    def _scales(self, words: list[list[Any]]) -> list[Any]:
        """Returns the norm's scales as f32, with the offset added to each."""
        assert self.norm is not None
        dtype = jnp.dtype(self.norm.scale.dtype)
        flat = [word for each in words for word in each]
        if dtype == jnp.float32:
            numbers = [arith.bitcast(ir.F32Type.get(), word) for word in flat]
        else:
            numbers = [x for word in flat for x in widened_pair(word, dtype)]
        if self.norm.offset:
            numbers = [arith.addf(x, number(self.norm.offset)) for x in numbers]
        return numbers

    def _add_squares(self, x, squares) -> None:
        """Sums the squares of every row over each warp's columns into ``squares`` [row, warp]."""
        chunks = self.K // CHUNK
        warp, lane = (f(thread(), constant(LANES)) for f in (arith.divui, arith.remui))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))
        for m in range(self.M):
            found = number(0.0)
            for start in range(0, chunks, WARPGROUP):
                chunk = total(thread(), constant(start))
                last = arith.minui(chunk, constant(chunks - 1))
                part = number(0.0)
                for word in _chunk(x, total((last, CHUNK), constant(m * self.K))):
                    for each in widened_pair(word, self.dtype):
                        part = arith.addf(part, arith.mulf(each, each))
                is_there = arith.cmpi(arith.CmpIPredicate.ult, chunk, constant(chunks))
                found = arith.addf(found, arith.select(is_there, part, number(0.0)))
            for distance in (16, 8, 4, 2, 1):
                found = arith.addf(found, from_lane_xor(found, distance))
            with mgpu_utils.when(is_first):
                place = total(address(squares), (warp, 4), constant(4 * WARPS * m))
                assembly(None, [place, found], "st.shared.f32 [$0], $1;", "r,f", pure=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Place of 16 bytes of x in shared memory, as i32 values."""

    turn: Any
    m: Any
    chunk: Any


def _chunk(ref: Any, at: Any, *, size: int = 2) -> list[Any]:
    """16 bytes of global memory, from element ``at`` on, of ``size`` bytes each."""
    return loaded("ld.global.nc.v4.b32", global_place(ref, at, size), 4, kind="l")
