"""Tile sizes of the kernels that read pages, and the layout of query heads in tiles.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import math

from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.paged_attention.spec import PagedCall

DTYPES = ("bfloat16", "float16")
ROWS = 64  # of a tile of queries: what the tensor cores multiply at a time
CODE_ROWS = (8, 16)  # where a quantized cache is multiplied: columns of a warp's product
GROUP_ROWS = 8  # which copies cannot divide
MERGED_ROWS = 4  # that the second kernel takes at a time, a warp each
WIDEST_VALUES = 256  # columns of an accumulator
BARRIER_BYTES = 1024
RING_BYTES = 128 * 1024
CODE_RING_BYTES = 160 * 1024  # scales are a tenth, or a fifth
MOST_STAGES = 8
RESULT_PADDING = 4  # columns of a warp's result in shared memory, so that banks differ
SCALE_HEADS = 8  # whose scales are copied together: copies are of at least 16 bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedConfig:
    """Tile sizes of a persistent block: its workers each have a ring of keys and values."""

    block_kv: int = 64  # keys per tile
    num_stages: int = 3  # tiles of keys, and of values, in flight per worker
    num_workers: int = 2
    num_blocks: int = NUM_PROCESSORS

    def team(self, layout: "QueryLayout") -> int:
        """Returns the number of workers per team; each reads other kv heads of the same pages."""
        return math.gcd(layout.K, self.num_blocks * self.num_workers)

    def num_teams(self, layout: "QueryLayout") -> int:
        """Returns the number of teams of workers over all blocks."""
        return self.num_blocks * self.num_workers // self.team(layout)

    def smem_bytes(self, layout: "QueryLayout") -> int:
        """Returns the bytes of shared memory per block."""
        ring = self.num_stages * self.block_kv * layout.slot_bytes
        queries = 2 * layout.tile * layout.H
        results = 0
        if layout.bits < 16:  # four warps' maxima, sums and results
            results = 4 * 4 * layout.tile * (layout.V + RESULT_PADDING + 2)
        return self.num_workers * (ring + queries + results) + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueryLayout:
    """Sizes of a paged attention call, and how its query heads are laid out as rows of tiles.

    A tile has ``span`` rows per token: the query heads of a kv head. As copies begin at multiples
    of 8 heads, these include some neighboring heads, whose results are not read.
    """

    B: int
    T: int
    N: int
    K: int
    H: int
    V: int
    size: int
    tile: int = ROWS  # most rows per tile
    bits: int = 16  # per element of pages

    @classmethod
    def of(cls, call: PagedCall) -> "QueryLayout":
        """Returns the layout of a call whose number of heads is a multiple of 8."""
        B, T, N, H = call.q_BTNH.shape
        _, size, K, _ = call.k_PSKH.shape
        layout = cls(B=B, T=T, N=N, K=K, H=H, V=call.value_width, size=size)
        if call.code is None:
            return layout
        least, most = CODE_ROWS
        tile = least if T == 1 and layout.span == least else most
        return dataclasses.replace(layout, tile=tile, bits=call.code.bits)

    @property
    def scale_heads(self) -> int:
        """Number of kv heads whose scales are copied together into a tile."""
        return min(self.K, SCALE_HEADS)

    @property
    def slot_bytes(self) -> int:
        """Number of bytes per slot in a tile: key, value, and scales if pages are quantized."""
        elements = (self.H + self.V) * self.bits // 8
        return elements + (4 * self.scale_heads if self.bits < 16 else 0)

    @property
    def group(self) -> int:
        """Number of query heads per kv head."""
        return self.N // self.K

    @property
    def span(self) -> int:
        """Number of tile rows per token."""
        if self.group % GROUP_ROWS == 0:
            rows = self.group
        else:  # a group may begin anywhere in its first eight rows, in steps of its factors of 2
            step = self.group & -self.group
            rows = -(-(GROUP_ROWS - step + self.group) // GROUP_ROWS) * GROUP_ROWS
        return rows if rows <= self.tile else -(-rows // self.tile) * self.tile

    @property
    def tokens(self) -> int:
        """Number of tokens per query tile; not more than a batch row has."""
        return max(1, min(self.T, self.tile // self.span))

    @property
    def tiles_per_token(self) -> int:
        """Number of tiles that one token's query heads take; if above 1, a tile has one token."""
        return max(1, self.span // self.tile)

    @property
    def rows(self) -> int:
        """Number of rows of a query tile that hold queries."""
        return min(self.tile, self.tokens * self.span)

    @property
    def num_q_tiles(self) -> int:
        """Number of query tiles per batch row and kv head."""
        return -(-self.T // self.tokens) * self.tiles_per_token

    @property
    def num_entries(self) -> int:
        """Number of query tiles of all batch rows; the plan has one entry for each."""
        return self.B * self.num_q_tiles

    @property
    def merged_group(self) -> int:
        """Number of query heads per kv head, padded as the merging kernel needs."""
        return -(-self.group // MERGED_ROWS) * MERGED_ROWS


def config_for(layout: QueryLayout) -> PagedConfig:
    """Returns a call's tile sizes: two workers if they fit, and rings of 128 KiB per block.

    Longer rings were measured to be 1% slower.
    """
    if layout.bits < 16:
        return _config_for_codes(layout)
    tile_bytes = PagedConfig().block_kv * layout.slot_bytes
    configs = [
        PagedConfig(num_stages=max(2, RING_BYTES // (workers * tile_bytes)), num_workers=workers)
        for workers in (2, 1)
    ]
    return next((c for c in configs if c.smem_bytes(layout) <= SMEM_BYTES), configs[-1])


def _config_for_codes(layout: QueryLayout) -> PagedConfig:
    """Tiles of a quantized cache: 128 keys, 32 for each warp."""
    config = PagedConfig(block_kv=128 if layout.size >= 64 else 64)
    fit = CODE_RING_BYTES // (config.num_workers * config.block_kv * layout.slot_bytes)
    most = min(max(2, fit), MOST_STAGES)
    configs = [dataclasses.replace(config, num_stages=n) for n in range(most, 1, -1)]
    return next((c for c in configs if c.smem_bytes(layout) <= SMEM_BYTES), configs[-1])
