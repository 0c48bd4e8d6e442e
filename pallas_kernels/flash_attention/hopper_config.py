"""Tile sizes of the Hopper attention kernels: what a tile is, what it costs, which one a call gets."""

import dataclasses

# A block may use 227 KiB of the 228 KiB of an sm_90 multiprocessor; the barriers take under 1 KiB.
SMEM_LIMIT_BYTES = 227 * 1024
BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardConfig:
    """Tiles of the forward kernel: ``num_warpgroups * 64`` query rows against ``block_kv`` keys."""

    block_kv: int
    num_warpgroups: int = 2  # compute warpgroups, 64 query rows each; one more feeds them
    num_stages: int = 2  # K and V tiles in flight
    overlap: bool = True  # QK of the next tile is issued before PV of this one
    lazy_rescale: bool = True  # rescale only when a row maximum grows by more than 2**8
    num_polynomial: int = 0  # strips of 8 keys whose exponentials bypass the special function unit
    ping_pong: bool = True  # warpgroups take turns at the tensor cores
    persistent: bool = False  # one block a multiprocessor loops over tiles

    @property
    def block_q(self) -> int:
        """Query rows of one block."""
        return 64 * self.num_warpgroups

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of one block, 16-bit operands."""
        q_or_out = self.block_q * max(head_dim, value_dim)
        kv = self.num_stages * self.block_kv * (head_dim + value_dim)
        return 2 * (q_or_out + kv) + 4 * self.block_q + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig:
    """Tiles of the fused backward: 128 keys against ``block_q`` queries at a time."""

    block_q: int = 64
    num_stages: int = 2
