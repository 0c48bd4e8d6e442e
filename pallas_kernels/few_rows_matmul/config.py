"""Tile sizes of the few-row kernels: which ones fit a product, and defaults without measurements.

Dims: M row of x, K contracted, N column of the weight.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.cluster_sums import STRIP, WIDTH
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES, WARPGROUP
from pallas_kernels.hopper.resident_rows import DEPTH
from pallas_kernels.hopper.resident_rows import MOST_ROWS as MOST_RESIDENT
from pallas_kernels.quantized_weight import QuantizedWeight

MOST_ROWS = 256
ROW_MULTIPLE = 8  # of a tile of rows that TMA copies
MOST_ROWS_AT_A_TIME = 64  # of a block that multiplies with a quantized weight
SPLITS = (1, 2, 4, 8)
_RESERVE = 2 * 1024  # bytes of barriers, sums of squares, and gaps between buffers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProductShape:
    """The sizes and formats of a product on which the choice of tiles depends."""

    M: int
    K: int
    N: int
    swiglu: bool = False  # the weight's columns are gates, then ups
    bits: int = 16  # per element of the weight; below 16 it is quantized
    group_rows: int = 0  # rows of a quantized weight that share a scale; 0: all
    scale_bytes: int = 4
    has_zeros: bool = False

    @classmethod
    def of(
        cls, rows: int, weight: jax.Array | QuantizedWeight, *, swiglu: bool = False
    ) -> "ProductShape":
        """Returns the shape of the product of ``rows`` rows and a weight."""
        if not isinstance(weight, QuantizedWeight):
            return cls(M=rows, K=weight.shape[0], N=weight.shape[1], swiglu=swiglu)
        depth, columns = weight.matrix_shape
        return cls(
            M=rows,
            K=depth,
            N=columns,
            swiglu=swiglu,
            bits=weight.format.code.bits,
            group_rows=weight.format.group_rows,
            scale_bytes=jnp.dtype(weight.scales.dtype).itemsize,
            has_zeros=weight.zeros is not None,
        )

    @property
    def padded_rows(self) -> int:
        """Number of rows of x padded to a multiple of 8, as TMA copies them."""
        return -(-self.M // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def num_groups(self) -> int:
        """Number of warpgroups that multiply, at 64 rows of x each."""
        return -(-self.M // GROUP_ROWS)

    @property
    def rows_at_a_time(self) -> int:
        """Number of rows of x that a block multiplies by a quantized weight in one pass."""
        return min(self.M, MOST_ROWS_AT_A_TIME)

    @property
    def strips(self) -> int:
        """Number of strips of 8 rows of x in a block."""
        return -(-self.rows_at_a_time // STRIP)

    @property
    def places(self) -> int:
        """Number of rows stored per strip if x stays in shared memory: 1 if M is 1, else 8."""
        return 1 if self.M == 1 else STRIP

    @property
    def words_per_lane(self) -> int:
        """Number of 32-bit words per lane in a block of codes (32 rows by 16 columns)."""
        return self.bits // 2

    @property
    def scale_arrays(self) -> tuple[str, ...]:
        """Names of the arrays of scales and zero points that a stage of the ring has."""
        return ("scales", "zeros")[: bool(self.scaled_parts) + self.has_zeros]

    @property
    def scaled_parts(self) -> int:
        """Number of scale groups in a stage of the ring; 0 if all rows of K share a scale."""
        return DEPTH // self.group_rows if self.group_rows else 0


FUSED_TILES = (1, 2, 4)
FUSED_STAGES = 24
_SYSTEM_BYTES = 1024  # of each block's shared memory that the system takes
_PART_BYTES = 8 * 1024  # read in the time that another block's sums take


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FusedConfig:
    """Tile sizes of the fused kernel, whose blocks have ``64 * tiles`` columns.

    The kernel multiplies 1 to 8 rows by a 16-bit weight; the blocks of a cluster split K.
    """

    tiles: int = 1  # of 64 columns per block; with ``swiglu`` half the columns are gates
    split: int = 4  # blocks per cluster, each with a part of K

    @property
    def depth(self) -> int:
        """Number of the weight's rows in a tile."""
        return DEPTH if self.tiles == 1 else DEPTH // 2

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that one tile of the weight takes."""
        return 2 * self.depth * WIDTH * self.tiles

    def steps(self, s: ProductShape) -> int:
        """Returns the number of weight tiles that a block multiplies by."""
        return s.K // self.depth // self.split

    def block_bytes(self, s: ProductShape) -> int:
        """Returns the bytes of shared memory that a block may use.

        Two blocks share an SM: one multiplies while the other begins or ends. If K is not split and
        there are at most as many blocks as SMs, a block gets all of an SM's shared memory.
        """
        if self.split == 1 and self.num_blocks(s) <= NUM_PROCESSORS:
            return SMEM_BYTES
        return (SMEM_BYTES + _SYSTEM_BYTES) // 2 - _SYSTEM_BYTES

    def num_stages(self, s: ProductShape) -> int:
        """Returns the number of weight tiles that fit in the ring beside x and the sums."""
        x = 2 * MOST_RESIDENT * (s.K // self.split)
        sums = 4 * 4 * self.tiles * WARPGROUP
        left = self.block_bytes(s) - _RESERVE - x - sums
        return min(left // self.stage_bytes, FUSED_STAGES, self.steps(s))

    def num_blocks(self, s: ProductShape) -> int:
        """Returns the number of blocks in all clusters."""
        return s.N // (WIDTH * self.tiles) * self.split

    def unsupported(self, s: ProductShape) -> str | None:
        """Returns why these tiles cannot compute a product; None if they can."""
        if self.tiles not in FUSED_TILES or s.N % (WIDTH * self.tiles):
            return f"N={s.N} is no multiple of {self.tiles} times {WIDTH}, one of {FUSED_TILES}"
        if s.swiglu and self.tiles == 1:
            return "a gated product has tiles of both halves"
        if self.split not in SPLITS or s.K % (DEPTH * self.split):
            return f"K={s.K} is no multiple of {self.split} times {DEPTH}; parts are {SPLITS}"
        if self.num_stages(s) < min(2, self.steps(s)):
            return "two tiles do not fit in shared memory beside x"
        return None


def fused_configs(s: ProductShape) -> list[FusedConfig]:
    """Returns all tile sizes of the fused kernel that can compute a product."""
    every = (FusedConfig(tiles=tiles, split=split) for tiles in FUSED_TILES for split in SPLITS)
    return [each for each in every if each.unsupported(s) is None]


def default_fused(s: ProductShape) -> FusedConfig | None:
    """Returns tiles that give every SM one or two blocks of equal work; None where none fits."""

    def cost(config: FusedConfig) -> float:
        """Bytes of the weight that the busiest SM reads, and as if for each part."""
        waves = math.ceil(config.num_blocks(s) / NUM_PROCESSORS)
        each = 2 * s.K // config.split * WIDTH * config.tiles
        return waves * each + _PART_BYTES * config.split

    return min(fused_configs(s), key=lambda c: (cost(c), c.split, -c.tiles), default=None)


GROUP_ROWS = 64  # of a warpgroup's product
SKINNY_DEPTHS = (64, 128)
SKINNY_WIDTHS = (32, 64, 128, 256)
SKINNY_STAGES = 24
TRANSPOSED_WARPGROUPS = 2  # that share the rows
SKINNY_SUMS = 128  # of a thread of these two, beside what else it needs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SkinnyConfig:
    """Tile sizes of the skinny kernel; a block has all rows of x and ``tile_n`` columns.

    The kernel multiplies 1 to 256 rows by a 16-bit weight; a block has all of K or one split.
    """

    tile_n: int = 64
    depth: int = 64  # length of a tile along K
    splits: int = 1  # parts of K; if above 1, partial sums are written in fp32 and XLA adds them
    transposed: bool = False  # the weight's columns are the MMA's left operand

    @property
    def out_bytes(self) -> int:
        """Bytes per number in the staged results: fp32 where K is split, else 16-bit."""
        return 4 if self.splits > 1 else 2

    def num_warpgroups(self, s: ProductShape) -> int:
        """Returns the number of warpgroups that multiply."""
        return TRANSPOSED_WARPGROUPS if self.transposed else s.num_groups

    def staged_rows(self, s: ProductShape) -> int:
        """Returns the number of rows of x in a shared-memory tile."""
        return s.padded_rows if self.transposed else s.num_groups * GROUP_ROWS

    def stage_bytes(self, s: ProductShape) -> int:
        """Returns the bytes of shared memory of a tile of x and one of the weight."""
        return 2 * self.depth * (self.tile_n + self.staged_rows(s))

    def num_stages(self, s: ProductShape) -> int:
        """Returns the number of tiles in the ring that fit beside results to store."""
        out = self.out_bytes * self.staged_rows(s) * self.tile_n // (2 if s.swiglu else 1)
        if self.transposed and self.splits > 1:
            out = 0  # sums leave from registers
        return min((SMEM_BYTES - _RESERVE - out) // self.stage_bytes(s), SKINNY_STAGES)

    def unsupported(self, s: ProductShape) -> str | None:
        """Returns why these tiles cannot compute a product; None if they can."""
        part, least = self.tile_n // 2 if s.swiglu else self.tile_n, SKINNY_WIDTHS[0]
        if self.tile_n not in SKINNY_WIDTHS or part < least or s.N % self.tile_n:
            return f"N={s.N} is no multiple of tiles of {self.tile_n}, or halves are under {least}"
        if self.depth not in SKINNY_DEPTHS or s.K % (self.depth * self.splits):
            return f"K={s.K} is not a multiple of {self.splits} times {self.depth}"
        if self.splits > 1 and s.swiglu:
            return "parts of K are of plain products"
        rows = s.padded_rows
        if self.transposed:
            if rows % (8 * TRANSPOSED_WARPGROUPS) or part % GROUP_ROWS:
                return f"{rows} rows do not divide by 16, or {part} columns by {GROUP_ROWS}"
            registers = rows * self.tile_n // TRANSPOSED_WARPGROUPS // WARPGROUP > SKINNY_SUMS
        else:
            registers = s.num_groups > 2 and self.tile_n > 128
        if registers:
            return f"{rows} rows by {self.tile_n} columns are too many registers"
        if self.num_stages(s) < 2:
            return "two tiles do not fit in shared memory"
        return None


def default_skinny(s: ProductShape) -> SkinnyConfig | None:
    """Returns tiles that make about as many blocks as SMs; None where none fits.

    Tiles have at least 64 columns if 64 divides N: a step of the ring is no faster with fewer.
    """

    def waves(config: SkinnyConfig) -> int:
        """Columns that an SM computes."""
        return -(-(s.N // config.tile_n) // NUM_PROCESSORS) * config.tile_n

    for least in (64, SKINNY_WIDTHS[0]):
        configs = [SkinnyConfig(tile_n=width) for width in SKINNY_WIDTHS if width >= least]
        fit = [each for each in configs if each.unsupported(s) is None]
        if fit:
            return min(fit, key=lambda config: (waves(config), -config.tile_n))
    return None


GROUPS = (1, 2, 4)
QUANTIZED_STAGES = 12
QUANTIZED_SUMS = 64  # of a thread's products; with scales of groups as many again


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedConfig:
    """Tile sizes of the quantized kernel, whose blocks have ``64 * tiles`` columns."""

    tiles: int = 2  # fragments of 16 columns per warp
    split: int = 4  # blocks per cluster, each with a part of K
    groups: int = 2  # warpgroups that multiply alternate stages
    stages: int = 4  # tiles of the weight in the ring

    def steps(self, s: ProductShape) -> int:
        """Returns the number of stages that a block multiplies."""
        return s.K // DEPTH // self.split

    def turns(self, s: ProductShape) -> int:
        """Returns the largest number of stages that one warpgroup multiplies."""
        return -(-self.steps(s) // self.groups)

    def is_resident(self, s: ProductShape) -> bool:
        """Returns whether a block's part of x stays in shared memory, not copied stage by stage."""
        return s.M <= MOST_RESIDENT and self.x_bytes(s) <= SMEM_BYTES // 2

    def x_bytes(self, s: ProductShape) -> int:
        """Returns the bytes of shared memory for a block's part of x if it is resident."""
        return 2 * s.strips * s.places * DEPTH * self.turns(s) * self.groups

    def shared_bytes(self, s: ProductShape) -> int:
        """Returns the total bytes of shared memory that a block uses."""
        columns = WIDTH * self.tiles
        stage = columns * DEPTH * s.bits // 8
        stage += s.scaled_parts * columns * (s.scale_bytes + 2 * s.has_zeros)
        if not self.is_resident(s):
            stage += 2 * s.strips * STRIP * DEPTH
        sums = 4 * columns * s.strips * STRIP * self.groups
        fixed = self.x_bytes(s) if self.is_resident(s) else 0
        return self.stages * stage + sums + fixed + _RESERVE

    def unsupported(self, s: ProductShape) -> str | None:
        """Returns why these tiles cannot compute a product; None if they can."""
        if s.N % (WIDTH * self.tiles):
            return f"N={s.N} is no multiple of {WIDTH * self.tiles} columns"
        if s.K % (DEPTH * self.split):
            return f"K={s.K} is no multiple of {self.split} times {DEPTH}"
        if self.split not in SPLITS or self.groups not in GROUPS:
            return f"{self.split} blocks of {self.groups} warpgroups: it takes {SPLITS}, {GROUPS}"
        if self.stages % self.groups:
            # A warpgroup counts the phases of a barrier by its own waits.
            return f"{self.stages} stages for {self.groups} warpgroups: each takes its own slots"
        if self.tiles * s.strips * 4 > QUANTIZED_SUMS:
            return f"{self.tiles} tiles of {s.rows_at_a_time} rows are too many registers"
        if self.shared_bytes(s) > SMEM_BYTES:
            return f"{self.shared_bytes(s)} bytes do not fit in shared memory"
        return None


def quantized_configs(s: ProductShape) -> list[QuantizedConfig]:
    """Returns all tile sizes of the quantized kernel for a product, with as many stages as fit."""
    found = []
    for tiles in range(1, 9):
        for split in SPLITS:
            for groups in GROUPS:
                most = max(groups, min(QUANTIZED_STAGES, s.K // DEPTH // split))
                for stages in range(most // groups * groups, 1, -groups):
                    config = QuantizedConfig(tiles=tiles, split=split, groups=groups, stages=stages)
                    if config.unsupported(s) is None:
                        found.append(config)
                        break
    return found


def default_quantized(s: ProductShape) -> QuantizedConfig | None:
    """Returns tiles that make about as many blocks as SMs; None where none fits."""

    def waves(config: QuantizedConfig) -> float:
        blocks = s.N // (WIDTH * config.tiles) * config.split
        blocks *= -(-s.M // MOST_ROWS_AT_A_TIME)
        work = config.tiles / config.split
        return math.ceil(blocks / NUM_PROCESSORS) * work

    found = [each for each in quantized_configs(s) if each.groups == 2] or quantized_configs(s)
    # Sums from many blocks take longer than what equal work saves, of one row too.
    found = [each for each in found if each.split <= 2] or found
    return min(found, key=lambda c: (waves(c), c.split, -c.tiles), default=None)
