"""Tiles of the kernel, by size. Dims: M row of x, K contracted, N column of the weight."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.hopper.cluster_sums import STRIP, WIDTH
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.hopper.resident_rows import DEPTH
from pallas_kernels.hopper.resident_rows import MOST_ROWS as MOST_RESIDENT

from .weight import QuantizedWeight

MOST_ROWS = 256
MOST_ROWS_AT_A_TIME = 64
MOST_SUMS = 64  # of products, that a thread keeps; with scales of groups as many again
RESERVE = 2 * 1024  # barriers, and gaps between buffers
SPLITS, GROUPS = (1, 2, 4, 8), (1, 2, 4)
MOST_STAGES = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProductShape:
    """What a product's tiles depend on."""

    M: int
    K: int
    N: int
    bits: int  # of a code
    group_rows: int = 0  # that share a scale; 0: all
    scale_bytes: int = 4
    has_zeros: bool = False

    @classmethod
    def of(cls, rows: int, weight: QuantizedWeight) -> "ProductShape":
        """Of so many rows and this weight."""
        depth, columns = weight.matrix_shape
        return cls(
            M=rows,
            K=depth,
            N=columns,
            bits=weight.format.code.bits,
            group_rows=weight.format.group_rows,
            scale_bytes=jnp.dtype(weight.scales.dtype).itemsize,
            has_zeros=weight.zeros is not None,
        )

    @property
    def rows_at_a_time(self) -> int:
        """Rows of x that a block multiplies."""
        return min(self.M, MOST_ROWS_AT_A_TIME)

    @property
    def strips(self) -> int:
        """Of 8 rows, in a block."""
        return -(-self.rows_at_a_time // STRIP)

    @property
    def places(self) -> int:
        """Of rows of a strip, in shared memory where x is resident: all lanes read a lone row."""
        return 1 if self.M == 1 else STRIP

    @property
    def words_per_lane(self) -> int:
        """In a block of 32 rows and 16 columns."""
        return self.bits // 2

    @property
    def scale_arrays(self) -> tuple[str, ...]:
        """What a stage has besides words, and x where that is staged too."""
        return ("scales", "zeros")[: bool(self.scaled_parts) + self.has_zeros]

    @property
    def scaled_parts(self) -> int:
        """Groups of a stage that have scales of their own; 0 where all rows share one."""
        return DEPTH // self.group_rows if self.group_rows else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedConfig:
    """A block has ``64 tiles`` columns of the weight and, with its cluster, all of K."""

    tiles: int = 2  # fragments of 16 columns that a warp has
    split: int = 4  # blocks of a cluster: each has a part of K
    groups: int = 2  # warpgroups that multiply: they take turns at a block's stages
    stages: int = 4  # tiles of the weight in the ring
    quads: bool = False  # others' sums read four at a time: by name only until a GPU has run it

    def steps(self, shape: ProductShape) -> int:
        """Stages of a block."""
        return shape.K // DEPTH // self.split

    def turns(self, shape: ProductShape) -> int:
        """Stages of a warpgroup, at most."""
        return -(-self.steps(shape) // self.groups)

    def is_resident(self, shape: ProductShape) -> bool:
        """Whether a block copies its part of x at once; else in stages, with the weight."""
        return shape.M <= MOST_RESIDENT and self.x_bytes(shape) <= SMEM_BYTES // 2

    def x_bytes(self, shape: ProductShape) -> int:
        """Shared memory of a block's part of x."""
        return 2 * shape.strips * shape.places * DEPTH * self.turns(shape) * self.groups

    def shared_bytes(self, shape: ProductShape) -> int:
        """Shared memory of all buffers."""
        columns = WIDTH * self.tiles
        stage = columns * DEPTH * shape.bits // 8
        stage += shape.scaled_parts * columns * (shape.scale_bytes + 2 * shape.has_zeros)
        if not self.is_resident(shape):
            stage += 2 * shape.strips * STRIP * DEPTH
        sums = 4 * columns * shape.strips * STRIP * self.groups
        fixed = self.x_bytes(shape) if self.is_resident(shape) else 0
        return self.stages * stage + sums + fixed + RESERVE

    def unsupported(self, shape: ProductShape) -> str | None:
        """Why these tiles cannot compute a product; None if they can."""
        if shape.N % (WIDTH * self.tiles):
            return f"N={shape.N} is no multiple of {WIDTH * self.tiles} columns"
        if shape.K % (DEPTH * self.split):
            return f"K={shape.K} is no multiple of {self.split} times {DEPTH}"
        if self.split not in SPLITS or self.groups not in GROUPS:
            return f"{self.split} blocks of {self.groups} warpgroups: it takes {SPLITS}, {GROUPS}"
        if self.stages % self.groups:
            # A warpgroup counts the phases of a barrier by its own waits.
            return f"{self.stages} stages for {self.groups} warpgroups: each takes its own slots"
        if self.tiles * shape.strips * 4 > MOST_SUMS:
            return f"{self.tiles} tiles of {shape.rows_at_a_time} rows are too many registers"
        if self.shared_bytes(shape) > SMEM_BYTES:
            return f"{self.shared_bytes(shape)} bytes do not fit in shared memory"
        return None


def configs(shape: ProductShape) -> list[QuantizedConfig]:
    """All that can compute a product, with as many stages as fit."""
    found = []
    for tiles in range(1, 9):
        for split in SPLITS:
            for groups in GROUPS:
                most = max(groups, min(MOST_STAGES, shape.K // DEPTH // split))
                for stages in range(most // groups * groups, 1, -groups):
                    config = QuantizedConfig(tiles=tiles, split=split, groups=groups, stages=stages)
                    if config.unsupported(shape) is None:
                        found.append(config)
                        break
    return found


def config_for(shape: ProductShape) -> QuantizedConfig | None:
    """As many blocks as there are multiprocessors, or nearly; None where no tile fits."""

    def waves(config: QuantizedConfig) -> float:
        blocks = shape.N // (WIDTH * config.tiles) * config.split
        blocks *= -(-shape.M // MOST_ROWS_AT_A_TIME)
        work = config.tiles / config.split
        return math.ceil(blocks / NUM_PROCESSORS) * work

    found = [each for each in configs(shape) if each.groups == 2] or configs(shape)
    # Sums from many blocks take longer than what equal work saves, of one row too.
    found = [each for each in found if each.split <= 2] or found
    return min(found, key=lambda c: (waves(c), c.split, -c.tiles), default=None)
