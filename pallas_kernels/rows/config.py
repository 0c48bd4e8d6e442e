"""The tile sizes of the row kernel: how rows are divided among warps, and the shared memory used.

Dims: A row or part of a row in a warpgroup, M column of a chunk, P part of a row.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper.machine import LANES, NUM_PROCESSORS, WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .formula import RowCall

NUM_CLUSTERS = {1: NUM_PROCESSORS, 2: 66, 4: 30, 8: 15}
"""Number of clusters that run at the same time, by blocks per cluster, with one block per SM."""

ALIGNMENT = 1024  # where Pallas starts each buffer, the compiler's own for reductions too
SMEM_PROCESSOR_BYTES, SMEM_BLOCK_BYTES = 228 * 1024, 1024
"""Shared memory of an SM, and the bytes of it that the system reserves per block."""
RESERVED_BYTES = 1024
"""Bytes left for the compiler: a block that counted all of shared memory was refused at launch."""
BARRIER_BYTES, BARRIER_WORDS = 8, 2
TURNS = 4
"""Buffers for exchanges that overlap: one is still read while the second next is written."""
REDUCTION_BYTES = 256  # scratch that the compiler gets for reductions


def tile_layout(vector: int):
    """Returns the register layout [A, M]: row a in warp ``a % 4``, ``vector`` columns per lane."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def lane_layout(num_parts: int):
    """Returns the register layout of [P]: every warp holds all P numbers, spread over its lanes."""
    width = min(num_parts, LANES)
    spread = (-2,) if width == LANES else (plgpu.Replicated(LANES // width), -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((width,), (1,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=spread,
        vector_dim=-1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """Tile sizes of the kernel over rows, and how warps share a row.

    Without ``rows_per_warp`` a row is split over all warps of a cluster. With it, a block is one
    warpgroup, and each of its warps takes whole rows.
    """

    cluster: int = 1  # blocks that share a row
    group: int = 1  # warpgroups per block
    rows_per_warp: int = 0  # whole rows per warp at a time; 0: rows are split
    tile: int = 512  # columns of a chunk per warp, in registers at a time
    chunks: int = 1  # chunks of a row per warpgroup; one chunk is one copy
    slots: int = 1  # chunks in shared memory
    vector: int = 8  # adjacent columns per thread
    turns: int = 1  # rows, or batches of whole rows, per cluster; 0: see ``workers``
    workers: int = 0  # clusters that divide all rows among them, if ``turns`` is 0
    ahead: bool = False  # the next row is folded before a row is finished; needs two rows' slots
    in_memory: int = 0  # last chunks whose vectors are in shared memory, not registers
    interpretable: bool = False  # uses Pallas's copies only, which the interpreter can run

    @property
    def num_parts(self) -> int:
        """Number of parts that a row is split into, one per warp."""
        return 1 if self.rows_per_warp else self.cluster * self.group * WARPS

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [A, M] of a chunk: its number of rows or parts, and the columns of each."""
        return WARPS * max(self.rows_per_warp, 1), self.tile

    @property
    def piece(self) -> int:
        """Number of elements of a chunk."""
        return self.shape[0] * self.tile

    @property
    def columns(self) -> int:
        """Number of columns in all chunks of a row (or of a batch of rows), padding included."""
        return self.cluster * self.group * self.chunks * self.piece


def buffers(c: RowConfig, call: RowCall) -> dict[str, Any]:
    """Returns the shared-memory buffers and barriers of a block, by name."""
    found: dict[str, Any] = {
        f"input{j}": plgpu.SMEM((c.group, c.slots, c.piece), dtype)
        for j, dtype in enumerate(call.dtypes)
    }
    if c.interpretable:
        found["full"] = plgpu.Barrier(num_arrivals=len(call.dtypes), num_barriers=c.group * c.slots)
    else:
        found["full"] = plgpu.SMEM((c.group, BARRIER_WORDS * c.slots), jnp.int32)
    if call.num_vectors and c.in_memory:
        for j in range(call.num_vectors):
            found[f"vector{j}"] = plgpu.SMEM((c.group, c.in_memory, WARPS, c.tile), jnp.float32)
    if c.rows_per_warp:
        return found
    found["numbers"] = plgpu.SMEM((TURNS, call.num_numbers, c.num_parts), jnp.float32)
    if c.cluster > 1:
        found["exchanged"] = plgpu.SMEM((TURNS * BARRIER_WORDS,), jnp.int32)
    elif c.group > 1:
        found["exchanged"] = plgpu.Barrier(num_arrivals=c.group, num_barriers=2)
    return found


def blocks_fit(blocks: int, c: RowConfig, call: RowCall) -> bool:
    """Returns whether an SM's shared memory holds ``blocks`` blocks of these tiles at once."""
    total = ALIGNMENT + RESERVED_BYTES  # scratch of reductions takes one alignment
    for buffer in buffers(c, call).values():
        if isinstance(buffer, plgpu.Barrier):
            total += BARRIER_BYTES * math.prod(np.atleast_1d(buffer.num_barriers).tolist())
        else:
            size = math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT
    return total <= SMEM_PROCESSOR_BYTES // blocks - SMEM_BLOCK_BYTES
