"""Tile sizes of the grouped kernels, and the multiples that operands' sizes must have."""

import dataclasses

NUM_COMPUTE = 2
"""Warpgroups that multiply: each has half of a tile's rows."""
LOADER = NUM_COMPUTE
WARPGROUP_ROWS = 64
BLOCK_ROWS = NUM_COMPUTE * WARPGROUP_ROWS
BLOCK_DEPTH = 64  # of a step's contraction: 128 bytes, the widest swizzle
WIDTH_MULTIPLE = 64
ROW_MULTIPLE = 8
"""TMA copies start at multiples of 8 rows. A group's first tile begins at the multiple of 8 at or
before its first row, and does not write the rows before that row."""
BAND = 8  # tiles of rows that are walked before the next: what L2 keeps
LINE_BYTES = 128
"""Bytes of a row of results that are stored at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedConfig:
    """Tile sizes of the 16-bit grouped kernels, and the order of tiles."""

    columns: int = 256  # per tile, of all weights together
    num_stages: int = 4
    in_any_order: bool = True
    """Each block takes its next tile from a counter in memory, otherwise every 132nd tile. The
    interpreter has no counter. Results are the same to the last bit."""
    gather: bool = True
    """Indexed rows are read in place. Otherwise they are copied in memory first, for the
    interpreter.
    """


FP8_DEPTH = 128
"""Depth in K of a step of 8-bit operands: one block of scales, 128 bytes per row."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledGroupedConfig(GroupedConfig):
    """Tile sizes of the 8-bit grouped kernel, which promotes its products to fp32 at every step."""

    in_turns: bool = True  # warpgroups issue products alternately
