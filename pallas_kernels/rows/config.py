"""How rows lie on the warps of a Hopper GPU."""

import dataclasses

from pallas_kernels.hopper.machine import LANES, NUM_PROCESSORS, WARPS
from pallas_kernels.hopper.mosaic import plgpu

NUM_CLUSTERS = {1: NUM_PROCESSORS, 2: 66, 4: 30, 8: 15}
"""By their blocks, how many run at the same time."""
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

    def slot_shape(self, columns: int) -> tuple[int, int]:
        """(A, M): rows or parts in a slot, columns of each."""
        if self.rows_per_warp:
            return WARPS * self.rows_per_warp, columns
        return WARPS, columns // self.num_parts


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
        return NUM_CLUSTERS[self.cluster]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twice:
    """A row to the blocks of a cluster, which read it twice and keep nothing of it."""

    cluster: int = 1  # blocks that share a row
    warpgroups: int = 4  # of a block
    tile: int = 512  # columns of a warp's part that are in registers at a time: a chunk
    chunks: int = 1  # of a warpgroup's share of a row
    slots: int = 4  # chunks in shared memory
    vector: int = 8

    @property
    def columns(self) -> int:
        """Of the rows that fit."""
        return self.cluster * self.warpgroups * self.chunks * WARPS * self.tile

    @property
    def num_clusters(self) -> int:
        """That run at the same time."""
        return NUM_CLUSTERS[self.cluster]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A row to a block, whose warpgroups take its tiles in turn, the last one overlapping."""

    warpgroups: int = 1
    tile: int = 512  # columns of a warp's part of a tile
    tiles: int = 1  # of a warpgroup; of a row, ``warpgroups`` times as many or some fewer
    vector: int = 1  # columns that a thread holds side by side: they divide all rows together
    in_memory: int = 0  # the last tiles that stay in shared memory; if none, all in registers
    most_workers: int = NUM_PROCESSORS  # blocks, where sums go from row to row
    interpretable: bool = False  # avoids what the interpreter lacks, references of another shape

    @property
    def columns(self) -> int:
        """Columns of a tile, at most those of a row."""
        return WARPS * self.tile

    def window(self, columns: int) -> int:
        """Columns, in whole vectors, that have any row among them."""
        more = self.vector - 1 if columns % self.vector else 0
        return -(-(columns + more) // self.vector) * self.vector


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """A row to a warp, to warpgroups of a block or to a cluster, wherever in a word it begins."""

    cluster: int = 1  # blocks that share a row
    group: int = 4  # warpgroups of a block that share a row; 0 gives each warp a row of its own
    teams: int = 1  # groups of a block, or warpgroups whose warps have rows of their own
    tile: int = 512  # columns of a warp's part of a chunk, which is in registers at a time
    chunks: int = 1  # of a warpgroup's share of a row: what arrives at once
    slots: int = 4  # chunks in shared memory
    vector: int = 8
    ahead: bool = False  # the next row is folded before a row is finished; needs two rows' slots
    in_memory: int = 0  # chunks whose vectors are in shared memory; those before are in registers
    most_turns: int = 0  # that a team takes; 0: as many blocks as run at once take all there are
    interpretable: bool = False  # avoids what the interpreter lacks: copies that are not Pallas's

    @property
    def by_warps(self) -> bool:
        """Whether each warp has a row of its own."""
        return not self.group

    @property
    def members(self) -> int:
        """Warpgroups of a block that share a row, or whose warps have rows of their own."""
        return self.group or 1

    @property
    def warpgroups(self) -> int:
        """Of a block."""
        return self.members * self.teams

    @property
    def piece(self) -> int:
        """Columns of a chunk, or of each warp's."""
        return self.tile if self.by_warps else WARPS * self.tile

    @property
    def columns(self) -> int:
        """Columns of the longest row that fits."""
        return self.cluster * self.members * self.chunks * self.piece

    @property
    def num_clusters(self) -> int:
        """That run at the same time."""
        return NUM_CLUSTERS[self.cluster]


type RowConfig = Blocks | Stream | Wide | Twice | Odd | Flat
