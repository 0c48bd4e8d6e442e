"""Tile sizes of the Hopper attention kernels: what a tile costs, and which one a call gets."""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

from pallas_kernels.common.errors import UnsupportedError

# A block may use 227 KiB of the 228 KiB of an sm_90 multiprocessor; the barriers take under 1 KiB.
SMEM_LIMIT_BYTES = 227 * 1024
BARRIER_BYTES = 1024

BACKWARD_KEYS, BACKWARD_QUERIES = 128, 64  # a tile of the backward up to 128 wide
NUM_DS = 2  # dS tiles in shared memory


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
    """Form of the fused backward of heads up to 128 wide: 128 keys a block, 64 queries at a time.

    Raises:
        UnsupportedError: from ``check``, for a form that the head width leaves no registers for.
    """

    num_stages: int = 2  # query tiles in flight
    register_ds: bool = False  # dK takes dS from registers
    dq_warpgroup: bool = False  # a third warpgroup computes dQ; else both do, one tile late

    def check(self, head_dim: int) -> None:
        """Refuses what was seen to serialize its matmuls or to spill."""
        if head_dim > 64 and (self.register_ds or self.dq_warpgroup):
            raise UnsupportedError(
                f"{self}: register_ds and dq_warpgroup need heads at most 64 wide, not {head_dim};"
                " leave both False"
            )

    def registers(self) -> Registers:
        """Registers a thread of each role; all that a multiprocessor has."""
        if not self.dq_warpgroup:
            return Registers(compute=240, load=24, dq=0)
        return Registers(compute=208, load=24, dq=72)

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of one block, 16-bit operands."""
        operands = (BACKWARD_KEYS + self.num_stages * BACKWARD_QUERIES) * (head_dim + value_dim)
        operands += NUM_DS * BACKWARD_KEYS * BACKWARD_QUERIES
        row_bytes = 4 * 3 * self.num_stages  # logsumexp, delta, id
        dq = 4 * BACKWARD_QUERIES * (128 if self.dq_warpgroup else head_dim)
        return 2 * operands + row_bytes * BACKWARD_QUERIES + dq + 4 * BACKWARD_KEYS + BARRIER_BYTES


def forward_config(head_dim: int, value_dim: int) -> ForwardConfig:
    """The fastest tiles measured on an H200 for this pair of widths."""
    return ForwardConfig(**_table()["forward"][f"{head_dim}/{value_dim}"])


def backward_config(head_dim: int, value_dim: int, group: int) -> BackwardConfig:
    """The fastest form measured on an H200; the plain one otherwise.

    Args:
        head_dim, value_dim: widths.
        group: query heads per key/value head. A block then loops that much longer.
    """
    table = _table()["backward"]
    widths = f"{head_dim}/{value_dim}"
    alone = table.get(f"{widths} ungrouped") if group == 1 else None
    return BackwardConfig(**(alone or table.get(widths, {})))


@functools.cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    path = importlib.resources.files(__package__) / "tuned" / "nvidia-h200.json"
    return json.loads(path.read_text())
