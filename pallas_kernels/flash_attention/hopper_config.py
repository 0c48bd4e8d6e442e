"""Tile sizes of the Hopper attention kernels: what a tile costs, and which one a call gets."""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

# A block may use 227 KiB of the 228 KiB of an sm_90 multiprocessor; the barriers take under 1 KiB.
SMEM_LIMIT_BYTES = 227 * 1024
BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardConfig:
    """Tiles of the forward kernel: ``num_warpgroups * 64`` query rows against ``block_kv`` keys."""

    block_kv: int
    num_warpgroups: int = 2  # compute warpgroups, 64 query rows each; one more feeds them
    num_stages: int = 2  # K and V tiles in flight
    overlap: bool = True  # keeps the softmax under the value product of the tile before
    lazy_rescale: bool = True  # rescale only when a row maximum grows by more than 2**8
    num_polynomial: int = 0  # strips of 8 keys whose exponentials bypass the special function unit
    ping_pong: bool = True  # warpgroups take turns at the tensor cores

    @property
    def block_q(self) -> int:
        """Query rows of one block."""
        return 64 * self.num_warpgroups

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of one block, 16-bit operands."""
        q_or_out = self.block_q * max(head_dim, value_dim)
        kv = self.num_stages * self.block_kv * (head_dim + value_dim)
        row_bytes = 4 * (1 + 8 + 1)  # logsumexp, pin, id
        ids = 4 * self.num_stages * self.block_kv
        return 2 * (q_or_out + kv) + row_bytes * self.block_q + ids + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Registers:
    """Registers of a thread, by the role of its warpgroup."""

    compute: int
    load: int
    dq: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig:
    """Tiles of the fused backward: 128 keys against ``block_q`` (64 or 128) queries at a time."""

    block_q: int = 64
    num_stages: int = 2
    wave_heads: int = 8  # key/value heads whose key tiles run side by side
    stagger: int = 0  # query tiles between the first steps of neighbouring key tiles
    late_dq: bool = False  # dQ of the tile before, so that warpgroups need not meet on this one
    register_ds: bool = False  # dK takes dS from registers
    register_k: bool = False  # the scores take K from registers
    dq_warpgroup: bool = False  # a third warpgroup computes dQ
    early_scores: bool = False  # the next scores beside dO V', with a warpgroup for dQ
    num_ds: int = 2  # dS tiles in shared memory

    def registers(self, head_dim: int) -> "Registers":
        """Registers a thread of each role; all that a multiprocessor has."""
        if not self.dq_warpgroup:
            return Registers(compute=240, load=24, dq=0)
        return Registers(compute=208, load=24, dq=72)

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of one block, 16-bit operands."""
        keys, width = 128, head_dim + value_dim
        operands = (keys + self.num_stages * self.block_q) * width
        operands += self.num_ds * keys * self.block_q
        row_bytes = 4 * 3 * self.num_stages  # logsumexp, delta, id
        dq = 4 * self.block_q * (128 if self.dq_warpgroup else head_dim)
        return 2 * operands + row_bytes * self.block_q + dq + 4 * keys + BARRIER_BYTES


def forward_config(head_dim: int, value_dim: int) -> ForwardConfig:
    """The fastest tiles measured on an H200 for this pair of widths."""
    return ForwardConfig(**_table()["forward"][f"{head_dim}/{value_dim}"])


def backward_config(head_dim: int, value_dim: int) -> BackwardConfig:
    """The fastest tiles measured on an H200 for this pair of widths; the only ones otherwise."""
    return BackwardConfig(**_table()["backward"].get(f"{head_dim}/{value_dim}", {}))


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    path = importlib.resources.files(__package__) / "tuned" / "nvidia-h200.json"
    return json.loads(path.read_text())
