"""How rows lie on the warps of a Hopper GPU."""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu

from .errors import UnsupportedError

WARPS = 4  # a warpgroup
LANES = 32
NUM_PROCESSORS = 132
SMEM_BYTES = 227 * 1024
LONGEST_WHOLE_ROW = 1024  # columns of a row that one warp holds
LONGEST_IN_BLOCK = 8192
LONGEST_ROW = 262144


def tile_layout(vector: int):
    """[A, M]: a row or part to a warp, ``vector`` columns to a lane."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def lane_layout(num_parts: int):
    """[P]: every warp has all parts, spread over its lanes."""
    width = min(num_parts, LANES)
    spread = (-2,) if width == LANES else (plgpu.Replicated(LANES // width), -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((width,), (1,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=spread,
        vector_dim=-1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A row, or a few short ones, to a block of one warpgroup; nothing is read ahead."""

    rows_per_warp: int = 0  # whole rows a warp holds; 0 splits a row
    vector: int = 8  # columns that a thread holds side by side
    most_turns: int = 1  # that a block takes one after another, which spares reading the vectors


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A row, or a few short ones, to one or two warpgroups of a block that reads ahead."""

    num_warpgroups: int = 4  # a block
    num_stages: int = 3  # slots of a warpgroup
    rows_per_warp: int = 0
    group: int = 1  # warpgroups of a block that share a row
    vector: int = 8

    @property
    def num_teams(self) -> int:
        """Rows, or batches of whole rows, that a block works on at a time."""
        return self.num_warpgroups // self.group

    @property
    def num_parts(self) -> int:
        """Parts of a row, one a warp."""
        return 1 if self.rows_per_warp else WARPS * self.group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """A row to a block, or to the blocks of a cluster."""

    cluster: int = 1  # blocks that share a row
    warpgroups: int = 4  # of a block
    tile: int = 512  # columns of a warp's part that are in registers at a time
    tiles: int = 1  # of a chunk: what arrives and is freed at once
    chunks: int = 1  # of a block's share of a row
    slots: int = 4  # chunks in shared memory
    vector: int = 8
    ahead: bool = False  # the next row is folded before a row is finished; needs two rows' slots
    in_memory: int = 0  # tiles whose vectors are in shared memory; those before are in registers
    row_a_block: bool = False  # as many blocks as rows, instead of one a multiprocessor

    @property
    def columns(self) -> int:
        """Of the rows that fit."""
        return self.cluster * self.warpgroups * self.chunks * self.tiles * WARPS * self.tile

    @property
    def num_clusters(self) -> int:
        """That run at the same time."""
        return {1: 132, 2: 66, 4: 30, 8: 15}[self.cluster]


type Config = Blocks | Stream | Wide


def config_for(
    shape: tuple[int, ...], *, num_inputs: int, num_vectors: int = 0, num_sums: int = 0
) -> Config:
    """Tiles for rows of 16-bit numbers.

    32 columns of a row to a thread leave registers for everything else; sums over rows take as many
    again, so there it is 16. Whatever shared memory remains is read-ahead.

    Raises:
        UnsupportedError: there are none.
    """
    rows, columns = shape
    if rows == 0 or not 0 < columns <= LONGEST_ROW:
        raise _refused(
            f"{rows} rows of {columns} columns: there must be rows, of 1 to {LONGEST_ROW} columns,"
        )
    if columns > LONGEST_IN_BLOCK:
        return _wide(columns, num_inputs, num_vectors, num_sums)
    batch = 0
    if columns <= LONGEST_WHOLE_ROW:
        most = LONGEST_WHOLE_ROW // columns
        batch = next((r for r in range(most, 0, -1) if rows % (WARPS * r) == 0), 0)
        if not batch:
            raise _refused(f"{rows} rows of {columns} columns are not a multiple of {WARPS} rows")
    in_block = num_sums == 0 and num_inputs * columns <= LONGEST_IN_BLOCK
    group = 1 if in_block or columns <= 4096 else 2
    lanes = LANES if batch else group * WARPS * LANES
    # 16 bytes at a time, but for fp32 vectors in shared memory, whose banks would conflict.
    widest = 4 if num_vectors and not in_block else 8
    vector = next((v for v in (8, 4, 2, 1) if v <= widest and columns % (lanes * v) == 0), 0)
    if not vector:
        raise _refused(f"{columns} columns are not a multiple of {lanes}")
    if in_block:
        return Blocks(rows_per_warp=batch, vector=vector, most_turns=2 if num_vectors else 1)
    config = Stream(rows_per_warp=batch, group=group, vector=vector)
    if num_sums and group == 1 and columns // config.num_parts > 512:
        # 32 columns a thread of inputs, vector and sums spill out of 128 registers: 64% of a copy's
        # rate with 4 warpgroups, 90% with 3.
        config = dataclasses.replace(config, num_warpgroups=3)
    slot = num_inputs * 2 * WARPS * (columns * batch if batch else columns // config.num_parts)
    stages = (SMEM_BYTES - 4096 - num_vectors * 4 * columns) // (slot * config.num_warpgroups)
    if stages < 2:  # to read ahead
        return _wide(columns, num_inputs, num_vectors, num_sums)
    return dataclasses.replace(config, num_stages=min(stages, 6))


def _wide(columns: int, num_inputs: int, num_vectors: int, num_sums: int) -> Wide:
    """The fewest blocks a row, where vectors and sums leave registers and read-ahead enough."""
    if columns == 32768 and num_inputs == 1 and not num_vectors:
        # Softmax: three blocks share a multiprocessor. 95.8% of a copy, where one that goes on from
        # row to row reaches 89.5% (norm/NOTES.md).
        return Wide(chunks=4, slots=4, row_a_block=True)
    most_held = 48 if num_sums else 64  # numbers a thread holds from row to row; more spill
    for cluster in (1, 2, 4, 8):
        part = columns // (cluster * 4 * WARPS)
        tile = next((t for t in (512, 384, 256, 128) if part % t == 0), 0)
        if not tile or columns % (cluster * 4 * WARPS * tile):
            continue
        num_tiles, a_tile = part // tile, tile // LANES
        left = most_held - num_tiles * a_tile * num_sums
        if left < 0:
            continue
        held = min(left // (a_tile * num_vectors), num_tiles) if num_vectors else num_tiles
        if num_sums and held < num_tiles:
            held = 0  # beside sums, half a scale in registers is slower than none
        vectors = (num_tiles - held) * num_vectors * 4 * 4 * WARPS * tile
        tiles = 2 if num_inputs == 1 and num_tiles % 2 == 0 else 1
        chunks = num_tiles // tiles
        slot = num_inputs * 2 * tiles * 4 * WARPS * tile
        exchanged = 256 * cluster * (4 if num_sums or num_inputs > 1 else 2)
        slots = (SMEM_BYTES - 1024 - exchanged - vectors) // slot
        slots = min(slots, max(6, chunks + 3) if num_inputs == 1 else 6)
        if (slots - chunks) * slot < (80 * 1024 if cluster < 8 else slot):
            continue
        return Wide(
            cluster=cluster, tile=tile, tiles=tiles, chunks=chunks, slots=slots,
            in_memory=num_tiles - held, vector=8 if held == num_tiles and tile % 256 == 0 else 4,
            ahead=cluster > 1 and num_sums == 0 and slots > 2 * chunks,
        )  # fmt: skip
    if columns % 2048:
        raise _refused(f"{columns} columns are not a multiple of 2048")
    what = f"{num_inputs} inputs, {num_vectors} vectors and {num_sums} sums"
    raise _refused(f"{columns} columns of {what} fit no registers and shared memory")


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"{why} in the Hopper kernels over rows; plain JAX takes any")
