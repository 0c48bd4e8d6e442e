"""Tiles of the Hopper kernel, and which ones a call gets."""

import dataclasses

from pallas_kernels.hopper.machine import NUM_PROCESSORS

DEPTH = 128  # of a step: one block of scales, and 128 bytes, one row of a swizzle
NUM_COMPUTE = 2  # warpgroups that multiply
WARPGROUP_ROWS = 64
STRIPE_BYTES = 128  # of a row of the result, what leaves at a time
LEAST_STEPS = 8  # of a split: fewer do not fill the ring


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig:
    """Tiles of one block and how its warpgroups share them."""

    tile_m: int = 128  # 64 a warpgroup, or 64 for both
    tile_n: int = 256
    part_n: int = 128  # columns of one product: what is promoted at a time
    num_stages: int = 4
    cluster: int = 1  # blocks of neighbouring rows, which share b
    num_out_slots: int = 2  # stripes of 128 bytes on their way out, a warpgroup
    in_turns: bool = True  # a warpgroup's product is issued after the other's last one
    band: int = 8  # tiles of rows (of columns) that are walked before the next: what L2 keeps
    band_of_columns: bool = False
    splits: int = 1  # of the contracted dim, summed by a second kernel
    num_blocks: int = NUM_PROCESSORS

    @property
    def by_columns(self) -> bool:
        """Each warpgroup has half the columns of 64 rows, instead of 64 rows of all columns."""
        return self.tile_m == WARPGROUP_ROWS

    @property
    def group_n(self) -> int:
        """Columns of one warpgroup."""
        return self.tile_n // NUM_COMPUTE if self.by_columns else self.tile_n

    @property
    def num_parts(self) -> int:
        """Products of one warpgroup and step."""
        return self.group_n // self.part_n


def shared_memory_bytes(config: ScaledConfig, *, columns_scaled: bool) -> int:
    """Of one block: the ring, results on their way out, barriers."""
    c = config
    stage = (c.tile_m + c.tile_n) * DEPTH + 4 * c.tile_n * columns_scaled
    out = NUM_COMPUTE * c.num_out_slots * WARPGROUP_ROWS * STRIPE_BYTES
    return c.num_stages * stage + out + 8 * (2 * c.num_stages + NUM_COMPUTE)


def scaled_config(M: int, N: int, K: int, *, columns_scaled: bool) -> ScaledConfig:
    """The tiles that a product gets."""
    config = ScaledConfig(num_out_slots=1 if columns_scaled else 2)
    if M <= WARPGROUP_ROWS:
        config = dataclasses.replace(config, tile_m=64, tile_n=128, part_n=64, num_stages=8)
    tiles = -(-M // config.tile_m) * -(-N // config.tile_n)
    steps = K // DEPTH
    even = (splits for splits in range(1, steps // LEAST_STEPS + 1) if steps % splits == 0)
    splits = max((s for s in even if tiles * s <= config.num_blocks), default=1)
    if splits > 1 or config.by_columns:  # these wait for memory, not for each other
        return dataclasses.replace(config, splits=splits, in_turns=False)
    return dataclasses.replace(config, cluster=2 if config.tile_m < M else 1)
