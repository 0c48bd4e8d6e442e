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
MOST_LAYERS = 32
"""Of a launch: addresses of their ten arrays are parameters of the kernel, of 4 KB at most."""
_MOST_STAGES = 32  # barriers of a kind
_RESERVE = 7 * 1024  # addresses of arrays, barriers, gaps between buffers
_PART_COST = 0.01  # of the time of a product, for each part that readers add


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A product's units, dealt out to blocks one by one: a column of tiles, or a part of its K.

    Blocks work on neighboring columns at the same time, so that what lies side by side in memory is
    read together. Units of several parts of K leave as many parts of each column.
    """

    K: int
    N: int
    blocks: int = NUM_PROCESSORS

    @property
    def across(self) -> int:
        """Columns of tiles."""
        return self.N // WIDTH

    @property
    def parts(self) -> int:
        """Of K: as few as give every block nearly the same."""
        tiles = self.K // DEPTH

        def cost(parts: int) -> float:
            units = -(-self.across * parts // self.blocks)
            return units * (tiles // parts) * (1 + _PART_COST * parts)

        return min((parts for parts in range(1, tiles + 1) if tiles % parts == 0), key=cost)

    @property
    def down(self) -> int:
        """Tiles of a unit."""
        return self.K // DEPTH // self.parts

    @property
    def units(self) -> int:
        """Of all blocks."""
        return self.across * self.parts

    @property
    def most(self) -> int:
        """Units of a block at most."""
        return -(-self.units // self.blocks)

    @property
    def most_rows(self) -> int:
        """Rows of the weight in a block's units, at most."""
        return self.most * self.down * DEPTH

    def unsupported(self) -> str | None:
        """Why it cannot be divided; None if it can."""
        if self.K % DEPTH or self.N % WIDTH:
            return f"{self.K} x {self.N} is no multiple of {DEPTH} x {WIDTH}"
        return None


def num_stages(x_numbers: int) -> int:
    """Tiles of the ring, beside so many fp32 numbers that weights are multiplied with."""
    sums = 2 * SLICES * WIDTH
    left = SMEM_BYTES - _RESERVE - 4 * (x_numbers + sums)
    return min(left // TILE_BYTES, _MOST_STAGES)
