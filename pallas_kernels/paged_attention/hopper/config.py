"""Tiles of the kernel that reads pages, and where a call's query heads lie in them.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import math

from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.paged_attention.spec import PagedCall

ROWS = 64  # of a tile of queries: what the tensor cores multiply at a time
GROUP_ROWS = 8  # which copies cannot divide
MERGED_ROWS = 4  # that the second kernel takes at a time, a warp each
WIDEST_PART = 256  # columns of an accumulator
BARRIER_BYTES = 1024
RING_BYTES = 128 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedConfig:
    """A block of one multiprocessor: workers, each with a ring of tiles of keys and values."""

    block_kv: int = 64  # keys of a tile
    num_stages: int = 3  # tiles of keys, and of values, in flight for each worker
    num_workers: int = 2
    num_queries: int = 1  # query tiles of a worker: of two, one comes while the other's part leaves
    value_parts: int = 1  # compute warpgroups of a worker, each with a part of the values' columns
    teams: bool = True  # workers side by side read the same pages, each for another kv head
    num_blocks: int = NUM_PROCESSORS

    def team(self, layout: "QueryLayout") -> int:
        """Workers of a team: kv heads whose pages are read at the same time."""
        return math.gcd(layout.K, self.num_blocks * self.num_workers) if self.teams else 1

    def num_teams(self, layout: "QueryLayout") -> int:
        """Teams of all blocks."""
        return self.num_blocks * self.num_workers // self.team(layout)

    def smem_bytes(self, layout: "QueryLayout") -> int:
        """Shared memory of a block, 16-bit operands."""
        values = 0 if layout.latent else layout.V
        ring = self.num_stages * self.block_kv * (layout.H + values)
        per_worker = 2 * (ring + self.num_queries * ROWS * layout.H) + 4 * ROWS
        return self.num_workers * per_worker + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueryLayout:
    """Sizes of a call, and its query heads as rows of tiles.

    A tile has tokens one after another, ``span`` rows each: a kv head's query heads and, because
    copies begin at multiples of 8 heads, some of their neighbours', whose results nobody reads.
    """

    B: int
    T: int
    N: int
    K: int
    H: int
    V: int
    size: int
    latent: bool

    @classmethod
    def of(cls, call: PagedCall) -> "QueryLayout":
        """The layout of a call whose heads are a multiple of 8."""
        B, T, N, H = call.q_BTNH.shape
        _, size, K, _ = call.k_PSKH.shape
        V, latent = call.spec.value_width, call.v_PSKV is None
        return cls(B=B, T=T, N=N, K=K, H=H, V=V, size=size, latent=latent)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.N // self.K

    @property
    def span(self) -> int:
        """Rows of a token."""
        if self.group % GROUP_ROWS == 0:
            rows = self.group
        else:  # a group may begin anywhere in its first eight rows, in steps of its factors of 2
            step = self.group & -self.group
            rows = -(-(GROUP_ROWS - step + self.group) // GROUP_ROWS) * GROUP_ROWS
        return rows if rows <= ROWS else -(-rows // ROWS) * ROWS

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return max(1, ROWS // self.span)

    @property
    def tiles_per_token(self) -> int:
        """Tiles that a token takes; above 1 only where a tile has one token."""
        return max(1, self.span // ROWS)

    @property
    def rows(self) -> int:
        """Rows of a tile that queries lie in."""
        return min(ROWS, self.tokens * self.span)

    @property
    def num_q_tiles(self) -> int:
        """Query tiles of a row of the batch, for each kv head."""
        return -(-self.T // self.tokens) * self.tiles_per_token

    @property
    def num_entries(self) -> int:
        """Query tiles of all rows; each is an entry of the plan, for all kv heads alike."""
        return self.B * self.num_q_tiles

    @property
    def merged_group(self) -> int:
        """The group, padded for the second kernel."""
        return -(-self.group // MERGED_ROWS) * MERGED_ROWS


def config_for(layout: QueryLayout) -> PagedConfig:
    """Two workers where they fit, and rings of 128 KiB in a block, at least two tiles each.

    Longer rings were measured to be 1% slower.
    """
    parts = -(-layout.V // WIDEST_PART)
    tile_bytes = 2 * PagedConfig().block_kv * (layout.H + (0 if layout.latent else layout.V))
    configs = [
        PagedConfig(
            num_stages=max(2, RING_BYTES // (workers * tile_bytes)),
            num_workers=workers,
            value_parts=parts,
        )
        for workers in ((2, 1) if parts == 1 else (1,))
    ]
    return next((c for c in configs if c.smem_bytes(layout) <= SMEM_BYTES), configs[-1])
