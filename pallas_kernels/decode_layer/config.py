"""How a layer's products are divided among blocks, and what fits in shared memory.

Dims: K contracted, N column of the weight.
"""

import dataclasses

from pallas_kernels.hopper.machine import LANES, NUM_PROCESSORS, SMEM_BYTES, WARPGROUP

DEPTH, WIDTH = 128, 64  # rows and columns of a tile of a weight
TILE_BYTES = 2 * DEPTH * WIDTH
GROUPS = 2  # warpgroups that multiply
THREADS = GROUPS * WARPGROUP
SLICES = THREADS // LANES  # warps, each with a part of a tile's rows
MOST_STAGES = 32  # barriers of a kind
_RESERVE = 2 * 1024  # barriers, gaps between buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A product's tiles in one line, down each column of tiles, cut into a piece for each block.

    Pieces differ by a tile at most. A piece ends anywhere in a column of tiles, so that columns are
    sums of several blocks' parts; block b's part of column t is number ``b - first_block(t)``.
    """

    K: int
    N: int
    blocks: int = NUM_PROCESSORS

    @property
    def down(self) -> int:
        """Tiles of a column of tiles."""
        return self.K // DEPTH

    @property
    def line(self) -> int:
        """All tiles."""
        return self.down * (self.N // WIDTH)

    @property
    def most(self) -> int:
        """Tiles of the longest piece."""
        return -(-self.line // self.blocks)

    def start(self, block: int) -> int:
        """The first tile of a block's piece."""
        return block * self.line // self.blocks

    def first_block(self, column: int) -> int:
        """Who has the first tile of a column of tiles: the last block that begins at or before."""
        return ((column * self.down + 1) * self.blocks - 1) // self.line

    def last_block(self, column: int) -> int:
        """Who has its last tile."""
        return ((column + 1) * self.down * self.blocks - 1) // self.line

    @property
    def parts(self) -> int:
        """Parts of a column at most."""
        columns = range(self.N // WIDTH)
        return max(self.last_block(t) - self.first_block(t) + 1 for t in columns)

    def unsupported(self) -> str | None:
        """Why it cannot be divided; None if it can."""
        if self.K % DEPTH or self.N % WIDTH:
            return f"{self.K} x {self.N} is no multiple of {DEPTH} x {WIDTH}"
        if self.line < self.blocks:
            return f"{self.K} x {self.N} are {self.line} tiles, fewer than {self.blocks} blocks"
        return None


def num_stages(x_numbers: int) -> int:
    """Tiles of the ring, beside so many fp32 numbers that weights are multiplied with."""
    sums = 2 * SLICES * WIDTH
    left = SMEM_BYTES - _RESERVE - 4 * (x_numbers + sums)
    return min(left // TILE_BYTES, MOST_STAGES)
