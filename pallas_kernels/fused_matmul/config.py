"""Tiles of the kernel of 1 to 8 rows, by size."""

import dataclasses
import math

from pallas_kernels.hopper.cluster_sums import WIDTH
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES, WARPGROUP
from pallas_kernels.hopper.resident_rows import DEPTH, MOST_ROWS

TILES, SPLITS = (1, 2, 4), (1, 2, 4, 8)
_KEPT = 1024  # bytes of each block's shared memory that the system takes
RESERVE = 2 * 1024  # barriers, sums of squares, gaps between buffers
MOST_STAGES = 24
_PART_BYTES = 8 * 1024  # read in the time that another block's sums take


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FusedConfig:
    """A block has so many columns of the weight and, with its cluster, all of K."""

    tiles: int = 1  # of 64 columns; of a gated product half of them are gates
    split: int = 4  # blocks of a cluster: each has a part of K

    @property
    def depth(self) -> int:
        """Of K, in a tile of the weight."""
        return DEPTH if self.tiles == 1 else DEPTH // 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile of the weight."""
        return 2 * self.depth * WIDTH * self.tiles

    def steps(self, K: int) -> int:
        """Tiles of the weight that a block multiplies with."""
        return K // self.depth // self.split

    def block_bytes(self, N: int) -> int:
        """Shared memory of a block.

        Two of them share a multiprocessor: one multiplies while the other begins or ends, and
        clusters find room. Blocks of their own that are fewer than multiprocessors have it all.
        """
        if self.split == 1 and self.num_blocks(N) <= NUM_PROCESSORS:
            return SMEM_BYTES
        return (SMEM_BYTES + _KEPT) // 2 - _KEPT

    def num_stages(self, N: int, K: int) -> int:
        """Tiles in the ring: what is left beside the block's part of x, and sums."""
        x = 2 * MOST_ROWS * (K // self.split)
        sums = 4 * 4 * self.tiles * WARPGROUP
        left = self.block_bytes(N) - RESERVE - x - sums
        return min(left // self.stage_bytes, MOST_STAGES, self.steps(K))

    def num_blocks(self, N: int) -> int:
        """Blocks of all clusters."""
        return N // (WIDTH * self.tiles) * self.split

    def unsupported(self, N: int, K: int, *, swiglu: bool) -> str | None:
        """Why these tiles cannot compute a product; None if they can."""
        if self.tiles not in TILES or N % (WIDTH * self.tiles):
            return f"N={N} is no multiple of {self.tiles} times {WIDTH}, one of {TILES}"
        if swiglu and self.tiles == 1:
            return "a gated product has tiles of both halves"
        if self.split not in SPLITS or K % (DEPTH * self.split):
            return f"K={K} is no multiple of {self.split} times {DEPTH}; parts are {SPLITS}"
        if self.num_stages(N, K) < min(2, self.steps(K)):
            return "two tiles do not fit in shared memory beside x"
        return None


def configs(N: int, K: int, *, swiglu: bool) -> list[FusedConfig]:
    """All that can compute a product."""
    every = (FusedConfig(tiles=tiles, split=split) for tiles in TILES for split in SPLITS)
    return [each for each in every if each.unsupported(N, K, swiglu=swiglu) is None]


def config_for(N: int, K: int, *, swiglu: bool) -> FusedConfig | None:
    """One or two blocks on every multiprocessor, with equal work; None where no tile fits."""

    def cost(config: FusedConfig) -> float:
        """Bytes of the weight that the busiest multiprocessor reads, and as if for each part."""
        waves = math.ceil(config.num_blocks(N) / NUM_PROCESSORS)
        each = 2 * K // config.split * WIDTH * config.tiles
        return waves * each + _PART_BYTES * config.split

    found = configs(N, K, swiglu=swiglu)
    return min(found, key=lambda c: (cost(c), c.split, -c.tiles), default=None)
