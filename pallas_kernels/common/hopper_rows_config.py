"""How rows lie on the warps of a Hopper GPU."""

import dataclasses

from .errors import UnsupportedError

WARPS = 4  # a warpgroup
LANES = 32
SMEM_BYTES = 227 * 1024
LONGEST_WHOLE_ROW = 1024  # columns of a row that one warp holds
LONGEST_ROW = 4096 * 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How rows lie on warps."""

    num_warpgroups: int = 4  # a block
    num_stages: int = 3  # slots of a warpgroup
    rows_per_warp: int = 0  # whole rows a warp holds; 0 splits a row
    group: int = 1  # warpgroups of a block that share a row
    cluster: int = 1  # blocks that share a row
    vector: int = 8  # columns that a thread holds side by side

    @property
    def num_teams(self) -> int:
        """Rows, or batches of whole rows, that a block works on at a time."""
        return self.num_warpgroups // self.group

    @property
    def num_parts(self) -> int:
        """Parts of a row, one a warp."""
        return 1 if self.rows_per_warp else WARPS * self.group * self.cluster


def config_for(
    shape: tuple[int, ...],
    itemsize: int,
    *,
    num_inputs: int,
    num_vectors: int = 0,
    accumulates: bool = False,
) -> Config:
    """Tiles for rows of this shape.

    32 columns of a row to a thread leave registers for everything else; 4 warpgroups have 128
    registers each thread. Whatever shared memory remains is read-ahead.

    Raises:
        UnsupportedError: there are none.
    """
    rows, columns = shape
    if rows == 0 or not 0 < columns <= LONGEST_ROW:
        raise _refused(
            f"{rows} rows of {columns} columns: there must be rows, of 1 to {LONGEST_ROW} columns,"
        )
    if columns <= LONGEST_WHOLE_ROW:
        vector = next((v for v in (8, 4, 2, 1) if columns % (LANES * v) == 0), None)
        if vector is None:
            raise _refused(f"{columns} columns are not a multiple of {LANES}")
        most = max(1, LONGEST_WHOLE_ROW // columns)
        batch = next((r for r in range(most, 0, -1) if rows % (WARPS * r) == 0), None)
        if batch is None:
            raise _refused(f"{rows} rows of {columns} columns are not a multiple of {WARPS} rows")
        config = Config(rows_per_warp=batch, vector=min(vector, 16 // itemsize))
    else:
        vector = 4 if num_vectors else 16 // itemsize
        parts = next(p for p in (1, 2, 4, 8, 16, 32) if columns <= 4096 * p)
        multiple = parts * WARPS * LANES * vector
        if columns % multiple:
            raise _refused(f"{columns} columns are not a multiple of {multiple}")
        group = min(parts, 4)
        config = Config(group=group, cluster=parts // group, vector=vector)
    if accumulates and config.group == 1 and columns // config.num_parts > 512:
        # 32 columns a thread of inputs, vector and sums spill out of 128 registers: 64% of a copy's
        # rate with 4 warpgroups, 90% with 3.
        config = dataclasses.replace(config, num_warpgroups=3)
    slot = num_inputs * itemsize * 4
    slot *= columns * config.rows_per_warp if config.rows_per_warp else columns // config.num_parts
    vectors = num_vectors * 4 * columns // config.cluster
    stages = (SMEM_BYTES - 4096 - vectors) // (slot * config.num_warpgroups)
    if stages < 2:
        raise _refused(
            f"{columns} columns of {itemsize} bytes leave no shared memory to read ahead"
        )
    return dataclasses.replace(config, num_stages=min(stages, 6))


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"{why} in the Hopper kernels over rows; plain JAX takes any")
