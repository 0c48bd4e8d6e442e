"""Tiles of a few rows' product whose K is split over warps. Dims as in ``config``."""

import dataclasses

from pallas_kernels.hopper.cluster_sums import COLUMNS
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES, WARPS
from pallas_kernels.hopper.resident_rows import DEPTH, MOST_ROWS

from .config import MOST_STAGES, RESERVE, ProductShape

GROUPS = (1, 2, 4)
MOST_FRAGMENTS = 7
LEAST_BLOCKS = 90


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlicedConfig:
    """A block has ``16 fragments passes`` columns and all of K, of which each warp has a slice."""

    fragments: int  # of 16 columns, at a time
    passes: int = 1  # times that a block reads all of K, for its next columns
    groups: int = 2  # warpgroups that multiply: each of their warps has 128 rows of a stage
    stages: int = 4  # tiles of the weight in the ring

    @property
    def units(self) -> int:
        """Times 128 rows in a stage: one for each warp."""
        return WARPS * self.groups

    @property
    def block_columns(self) -> int:
        """Columns of a block."""
        return COLUMNS * self.fragments * self.passes

    def steps(self, shape: ProductShape) -> int:
        """Stages of a pass."""
        return shape.K // (DEPTH * self.units)

    def shared_bytes(self, shape: ProductShape) -> int:
        """Shared memory of all buffers."""
        columns = COLUMNS * self.fragments
        stage = self.units * DEPTH * columns * shape.bits // 8
        scale = shape.scale_bytes + 2 * shape.has_zeros
        stage += self.units * shape.scaled_parts * columns * scale
        sums = 4 * self.units * self.block_columns * shape.M
        return self.stages * stage + sums + 2 * shape.K * shape.places + RESERVE

    def unsupported(self, shape: ProductShape) -> str | None:
        """Why these tiles cannot compute a product; None if they can."""
        if not 1 <= shape.M <= MOST_ROWS:
            return f"{shape.M} rows: with K split over warps it takes 1 to {MOST_ROWS}"
        if min(self.fragments, self.passes, self.stages) < 1 or self.groups not in GROUPS:
            return f"{self.groups} warpgroups: it takes {GROUPS}, and counts of 1 and more"
        if self.fragments > MOST_FRAGMENTS:
            return f"{self.fragments} fragments at a time: it takes 1 to {MOST_FRAGMENTS}"
        if shape.N % self.block_columns:
            return f"N={shape.N} is no multiple of {self.block_columns} columns"
        if shape.K % (DEPTH * self.units):
            return f"K={shape.K} is no multiple of {DEPTH * self.units}: 128 rows for each warp"
        if self.shared_bytes(shape) > SMEM_BYTES:
            return f"{self.shared_bytes(shape)} bytes do not fit in shared memory"
        return None


def sliced_configs(shape: ProductShape) -> list[SlicedConfig]:
    """Tilings by which each multiprocessor has one block, and almost every one has one: two and
    four warpgroups, few and many fragments at a time, as many stages as fit.
    """
    across = shape.N // COLUMNS
    blocks = [n for n in range(NUM_PROCESSORS, LEAST_BLOCKS - 1, -1) if across % n == 0]
    if shape.N % COLUMNS or not blocks:
        return []
    share = across // blocks[0]
    divisors = [n for n in range(1, MOST_FRAGMENTS + 1) if share % n == 0]
    few = [n for n in divisors if n <= 3]
    found = []
    for fragments in dict.fromkeys((few[-1], divisors[-1])):
        passes = share // fragments
        for groups in GROUPS[1:]:
            fitting = _with_most_stages(
                SlicedConfig(fragments=fragments, passes=passes, groups=groups), shape
            )
            found += [] if fitting is None else [fitting]
    return found


def _with_most_stages(config: SlicedConfig, shape: ProductShape) -> SlicedConfig | None:
    """None where not even two fit, of a weight that does not fit in one."""
    most = min(MOST_STAGES, config.steps(shape) * config.passes)
    least = min(most, 2)
    for stages in range(most, max(least, 1) - 1, -1):
        more = dataclasses.replace(config, stages=stages)
        if more.unsupported(shape) is None:
            return more
    return None
