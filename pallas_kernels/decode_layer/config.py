"""The division of a layer's products among blocks, and the tiles that fit in shared memory.

Dims: K contracted, N column of the weight.
"""

import dataclasses

import jax

from pallas_kernels.hopper.machine import LANES, NUM_PROCESSORS, SMEM_BYTES, WARPGROUP
from pallas_kernels.quantized_weight import QuantizedWeight, WeightCode

DEPTH, WIDTH = 128, 64  # rows and columns of a tile of 16-bit numbers
TILE_BYTES = 2 * DEPTH * WIDTH
BLOCK_ROWS = 32  # of a line of codes
GROUPS = 2  # warpgroups that multiply
THREADS = GROUPS * WARPGROUP
SLICES = THREADS // LANES  # warps, each with a part of a tile's rows
_MOST_STAGES = 32  # barriers of a kind
_RESERVE = 4 * 1024  # barriers, gaps between buffers
_PART_COST = 0.01  # of the time of a product, for each part that readers add


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileForm:
    """Layout of a weight tile: lines of 64 columns by one row, or by 32 rows of codes."""

    code: WeightCode | None = None  # None: a 16-bit weight
    group_rows: int = 0  # rows that share a scale; 0: all
    scale_bytes: int = 2

    @classmethod
    def of(cls, weight: jax.Array | QuantizedWeight) -> "TileForm":
        """Returns the tile layout of a weight; a quantized one must be ``arranged``."""
        if not isinstance(weight, QuantizedWeight):
            return cls()
        form, scale_bytes = weight.format, weight.scales.dtype.itemsize
        return cls(code=form.code, group_rows=form.group_rows, scale_bytes=scale_bytes)

    @property
    def line_rows(self) -> int:
        """Number of the weight's rows in a line."""
        return 1 if self.code is None else BLOCK_ROWS

    @property
    def row_bits(self) -> int:
        """Number of bits per column of a line, over all its rows."""
        return self.line_rows * (16 if self.code is None else self.code.bits)

    @property
    def line_bytes(self) -> int:
        """Number of bytes in a line of a tile."""
        return WIDTH * self.row_bits // 8

    @property
    def depth(self) -> int:
        """Number of the weight's rows in a tile."""
        return TILE_BYTES // self.line_bytes * self.line_rows

    @property
    def groups(self) -> int:
        """Number of groups in a tile; the rows of a group share a scale."""
        if self.code is None:
            return 0
        return max(1, self.depth // self.group_rows) if self.group_rows else 1

    @property
    def stage_bytes(self) -> int:
        """Number of bytes of a tile and its scales."""
        return TILE_BYTES + self.groups * WIDTH * self.scale_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkSplit:
    """Division of a product among blocks into units: a unit is a column of tiles or a split of it.

    Blocks work on neighboring columns at the same time, so that neighboring memory is read
    together. If K is split into parts, each part writes its own partial sums of the columns.
    """

    K: int
    N: int
    blocks: int = NUM_PROCESSORS
    depth: int = DEPTH  # rows per tile
    devices: int = 1  # GPUs that each sum K rows of their own, of which readers need all sums

    @property
    def across(self) -> int:
        """Number of tile columns of the weight."""
        return self.N // WIDTH

    @property
    def parts(self) -> int:
        """Number of parts that K is split into: as few as balance the blocks."""
        tiles = self.K // self.depth

        def cost(parts: int) -> float:
            units = -(-self.across * parts // self.blocks)
            return units * (tiles // parts) * (1 + _PART_COST * parts * self.devices)

        return min((parts for parts in range(1, tiles + 1) if tiles % parts == 0), key=cost)

    @property
    def sums(self) -> int:
        """Number of partial sums of a column, over all devices."""
        return self.devices * self.parts

    @property
    def down(self) -> int:
        """Number of tiles in a unit."""
        return self.K // self.depth // self.parts

    @property
    def units(self) -> int:
        """Number of units that all blocks have in total."""
        return self.across * self.parts

    @property
    def most(self) -> int:
        """Largest number of units that a block has."""
        return -(-self.units // self.blocks)

    @property
    def rows(self) -> int:
        """Number of the weight's rows in a unit."""
        return self.down * self.depth

    @property
    def most_rows(self) -> int:
        """Largest number of the weight's rows in one block's units."""
        return self.most * self.rows

    def unsupported(self) -> str | None:
        """Returns why the product cannot be divided into tiles; None if it can."""
        if self.K % self.depth or self.N % WIDTH:
            return f"{self.K} x {self.N} is no multiple of {self.depth} x {WIDTH}"
        return None


def num_stages(x_bytes: int, stage_bytes: int = TILE_BYTES) -> int:
    """Returns the number of tiles that fit in the ring beside ``x_bytes`` of products' input."""
    left = SMEM_BYTES - _RESERVE - x_bytes - 4 * 2 * SLICES * WIDTH
    return min(left // stage_bytes, _MOST_STAGES)
