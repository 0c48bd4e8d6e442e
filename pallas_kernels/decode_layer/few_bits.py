"""One thread's part of a tile of codes: fragments of the tensor cores, as ``quantized_matmul`` has.

A warp has one or two blocks of 32 rows of every tile, and all 64 columns. The right operand has the
one row of x in all its eight places, so that every lane ``4 g + t`` has the sums of columns g and
g + 8 of each block of 16.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.mosaic import arith, mgpu_utils
from pallas_kernels.hopper.threads import address, assembly, constant, fused, i32, number, total
from pallas_kernels.quantized_matmul.codes import COLUMNS
from pallas_kernels.quantized_matmul.fragments import Dequantizer, load_number, load_words

from .config import BLOCK_ROWS, SLICES, TILE_BYTES, WIDTH, TileForm
from .per_thread import below, warp_and_lane

FRAGMENTS = WIDTH // COLUMNS
_STEPS = 2  # of 16 rows, in a block
_LANES = 4  # that have the same columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FewBitTile:
    """How a tile of codes is multiplied."""

    form: TileForm
    dtype: jnp.dtype  # of x
    scale_dtype: jnp.dtype

    @property
    def dequantizer(self) -> Dequantizer:
        """What makes numbers of codes."""
        assert self.form.code is not None, "16 bits"
        return Dequantizer(code=self.form.code, dtype=self.dtype)

    @property
    def blocks(self) -> int:
        """Of 32 rows, of a warp."""
        return self.form.depth // BLOCK_ROWS // SLICES

    def tile(self, sums: list[Any], place, x, row) -> list[Any]:
        """Sums with the products of a tile at ``place`` and x from ``row`` on."""
        warp, lane = warp_and_lane()
        g, t = (f(lane, constant(_LANES)) for f in (arith.divui, arith.remui))
        first = total((warp, self.blocks * BLOCK_ROWS))
        x_place = total(address(x), (total(row, first), 2), (t, 4))
        per_lane = self.form.line_bytes // FRAGMENTS // 32 // 4  # words
        words_place = total(place, (warp, self.blocks * self.form.line_bytes), (lane, 4 * per_lane))
        group = arith.divui(first, constant(self.form.depth // self.form.groups))
        scale_place = total(
            place, constant(TILE_BYTES),
            (group, WIDTH * self.form.scale_bytes), (g, self.form.scale_bytes),
        )  # fmt: skip
        rows = [
            assembly(i32(), [x_place], f"ld.shared.b32 $0, [$1+{16 * i}];", "=r,r", pure=False)
            for i in range(self.blocks * BLOCK_ROWS // 8)
        ]
        zeros = (self.dequantizer.zero_pair(None),) * 2
        found = []
        for fragment in range(FRAGMENTS):
            products = [number(0.0)] * 4
            for block in range(self.blocks):
                offset = block * self.form.line_bytes + fragment * 4 * per_lane * 32
                words = load_words(words_place, offset, per_lane)
                for step in range(_STEPS):
                    mine = words[step * per_lane // 2 : (step + 1) * per_lane // 2]
                    left = self.dequantizer.numbers(mine, zeros)
                    at = 2 * (_STEPS * block + step)
                    products = self.dequantizer.product(left, rows[at : at + 2], products)
            for r in range(2):
                offset = self.form.scale_bytes * (COLUMNS * fragment + 8 * r)
                scale = load_number(scale_place, offset, self.scale_dtype)
                found.append(fused(products[2 * r], scale, sums[2 * fragment + r]))
        return found

    def keep(self, sums: list[Any], place) -> None:
        """A warp's sums to shared memory, in the order of columns; of one lane of four."""
        _, lane = warp_and_lane()
        g, t = (f(lane, constant(_LANES)) for f in (arith.divui, arith.remui))
        with mgpu_utils.when(below(t, constant(1))):
            for i, each in enumerate(sums):
                fragment, r = divmod(i, 2)
                text = f"st.shared.f32 [$0+{4 * (COLUMNS * fragment + 8 * r)}], $1;"
                assembly(None, [total(place, (g, 4)), each], text, "r,f", pure=False)
