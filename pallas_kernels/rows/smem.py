"""The shared memory of the kernels over rows: what they allocate, and how many bytes that is.

Dims: A row or part in a slot, M column of a tile or part, P part of a row.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .config import Flat, Odd, Stream, Twice, Wide
from .flat_order import unit_of
from .formula import RowCall

ALIGNMENT = 1024  # where Pallas starts each buffer, the compiler's own for reductions too
SMEM_PROCESSOR_BYTES, SMEM_BLOCK_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor, and what it takes for itself of each block's."""
RESERVED_BYTES = 1024
"""For the compiler, beside what is counted here."""
BARRIER_BYTES = 8
BARRIER_WORDS = 2  # of int32, where a kernel makes barriers of its own
REDUCTION_BYTES = 256  # what kernels whose blocks exchange give the compiler
TURNS = 4  # exchanges that may overlap: one is still read while the second next is written


def smem_bytes(config: Stream | Wide | Twice | Odd | Flat, call: RowCall) -> int:
    """What a block allocates: no kernel may ask for more than ``machine.SMEM_BYTES``."""
    total = 0 if isinstance(config, Stream) else _aligned(REDUCTION_BYTES)
    if isinstance(config, Stream):
        scratch = stream_scratch(config, call)
    elif isinstance(config, Wide):
        scratch = wide_scratch(config, call)
    elif isinstance(config, Twice):
        scratch = twice_scratch(config, call)
    elif isinstance(config, Flat):
        scratch = flat_scratch(config, call)
    else:
        scratch = odd_scratch(config, call)
    for buffer in scratch.values():
        if isinstance(buffer, plgpu.Barrier):
            total += BARRIER_BYTES * math.prod(np.atleast_1d(buffer.num_barriers).tolist())
        else:
            total += _aligned(math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize)
    return total


def blocks_fit(blocks: int, config: Stream | Wide | Twice | Odd | Flat, call: RowCall) -> bool:
    """Whether a multiprocessor has shared memory for so many."""
    room = SMEM_PROCESSOR_BYTES // blocks - SMEM_BLOCK_BYTES
    return smem_bytes(config, call) + RESERVED_BYTES < room


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def stream_scratch(c: Stream, call: RowCall) -> dict[str, Any]:
    """Buffers and barriers of ``stream`` by name."""
    A, M = c.slot_shape(call.columns)
    vector = (1, 1, M) if c.rows_per_warp else (c.group, WARPS, M)
    buffers: dict[str, Any] = {
        f"input{j}": plgpu.SMEM((c.num_warpgroups, c.num_stages, A, M), dtype)
        for j, dtype in enumerate(call.dtypes)
    }
    for j in range(call.num_vectors):
        buffers[f"vector{j}"] = plgpu.SMEM(vector, jnp.float32)
    buffers["full"] = plgpu.Barrier(
        num_arrivals=len(call.dtypes), num_barriers=c.num_warpgroups * c.num_stages
    )
    if call.num_vectors:
        buffers["vectors_full"] = plgpu.Barrier(num_arrivals=call.num_vectors)
    if not c.rows_per_warp:
        # In turns, so that one barrier an exchange is enough.
        shape = (c.num_teams, 2, call.num_numbers, c.group * WARPS)
        buffers["numbers"] = plgpu.SMEM(shape, jnp.float32)
        if c.group > 1:
            buffers["numbers_full"] = plgpu.Barrier(num_arrivals=c.group, num_barriers=c.num_teams)
    return buffers


def wide_scratch(c: Wide, call: RowCall) -> dict[str, Any]:
    """Buffers and barriers of ``wide`` by name."""
    chunks = (c.warpgroups, c.slots, c.tiles, WARPS, c.tile)
    buffers = _slots(c, chunks, call)
    if c.in_memory:
        shape = (c.warpgroups, c.in_memory, WARPS, c.tile)
        for j in range(call.num_vectors):
            buffers[f"vector{j}"] = plgpu.SMEM(shape, jnp.float32)
    if call.num_vectors and c.in_memory:
        buffers["vectors_full"] = plgpu.Barrier(
            num_arrivals=call.num_vectors * c.warpgroups * c.in_memory
        )
    return buffers


def twice_scratch(c: Twice, call: RowCall) -> dict[str, Any]:
    """Buffers and barriers of ``twice`` by name."""
    return _slots(c, (c.warpgroups, c.slots, WARPS, c.tile), call)


def odd_scratch(c: Odd, call: RowCall) -> dict[str, Any]:
    """Buffers and barriers of ``odd`` by name."""
    buffers: dict[str, Any] = {}
    if c.in_memory:
        shape = (c.warpgroups, c.in_memory, WARPS, c.tile)
        for j in range(call.num_inputs):
            buffers[f"held{j}"] = plgpu.SMEM(shape, call.dtype)
    num_parts = c.warpgroups * WARPS
    buffers["numbers"] = plgpu.SMEM((TURNS, call.num_numbers, num_parts), jnp.float32)
    buffers["exchanged"] = plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=2)
    return buffers


def flat_scratch(c: Flat, call: RowCall) -> dict[str, Any]:
    """Buffers and barriers of ``flat`` by name."""
    word = 16 // call.itemsize
    size = WARPS * c.tile + word * (unit_of(c, call) < word)
    buffers: dict[str, Any] = {
        f"input{j}": plgpu.SMEM((c.warpgroups, c.slots, size), call.dtype)
        for j in range(call.num_inputs)
    }
    if c.interpretable:
        pieces = WARPS if c.by_warps else 1
        buffers["full"] = plgpu.Barrier(
            num_arrivals=call.num_inputs * pieces, num_barriers=c.warpgroups * c.slots
        )
    else:
        buffers["full"] = plgpu.SMEM((c.warpgroups, BARRIER_WORDS * c.slots), jnp.int32)
    if call.num_vectors and c.in_memory:
        tile = (c.tile,) if c.by_warps else (WARPS, c.tile)
        for j in range(call.num_vectors):
            buffers[f"vector{j}"] = plgpu.SMEM((c.members, c.in_memory, *tile), jnp.float32)
        buffers["vectors_full"] = plgpu.Barrier(
            num_arrivals=call.num_vectors * c.members * c.in_memory
        )
    if c.by_warps:
        return buffers
    num_parts = c.cluster * c.group * WARPS
    buffers["numbers"] = plgpu.SMEM((c.teams * TURNS, call.num_numbers, num_parts), jnp.float32)
    if c.cluster > 1:
        buffers["exchanged"] = plgpu.SMEM((c.teams * TURNS * BARRIER_WORDS,), jnp.int32)
    elif c.group > 1:
        buffers["exchanged"] = plgpu.Barrier(num_arrivals=c.group, num_barriers=2 * c.teams)
    return buffers


def _slots(c: Wide | Twice, shape: tuple[int, ...], call: RowCall) -> dict[str, Any]:
    """Of inputs, and what the blocks of a row exchange by."""
    buffers: dict[str, Any] = {
        f"input{j}": plgpu.SMEM(shape, dtype) for j, dtype in enumerate(call.dtypes)
    }
    buffers["full"] = plgpu.Barrier(
        num_arrivals=len(call.dtypes), num_barriers=c.warpgroups * c.slots
    )
    num_parts = c.cluster * c.warpgroups * WARPS
    buffers["numbers"] = plgpu.SMEM((TURNS, call.num_numbers, num_parts), jnp.float32)
    if c.cluster > 1:
        buffers["exchanged"] = plgpu.SMEM((TURNS * BARRIER_WORDS,), jnp.int32)
    else:
        buffers["exchanged"] = plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=2)
    return buffers
