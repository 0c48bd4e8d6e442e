"""Which blocks take a row, or two, and end: several of them share a multiprocessor.

One's writes overlap another's reads and exchange, as the hardware has it. That beats blocks that go
from row to row wherever nothing, or only RMSNorm's scale, is read again for each row: softmax of
102,440 columns has 98% of a copy's rate instead of 84 (norm/NOTES.md).
"""

import dataclasses
import itertools

import jax.numpy as jnp

from pallas_kernels.hopper.machine import LANES, WARPGROUP, WARPS

from .config import LONGEST_IN_BLOCK, LONGEST_ROW, Flat, Wide
from .flat_choice import CLUSTERS, LONGEST_OF_A_WARP, NARROWER, computed_for_nothing, tiled
from .flat_order import reach_of
from .formula import RowCall
from .smem import blocks_fit

LEAST_TIMED = 1000
"""Columns of ``flat`` rows, the fewest that were timed (``flat-rows-h200.json``)."""
LONGEST_OF_A_WARP_SCALED = 2560
"""Bytes of a row that is a warp's, if there is a scale: of 1,503 columns four warps reach 95% of a
copy's rate, one 93."""
MOST_OF_A_WARP, MOST_SCALE_OF_A_WARP = 48, 40
"""Columns of a chunk that a lane has, and numbers of a scale that it holds in registers."""

SHARE = 64 * 1024
"""Bytes of a row that a block of four warpgroups takes at most, so that three blocks fit."""
LARGEST_SHARE = 128 * 1024
"""Instead, if eight blocks share it: one block without a neighbor is no slower than one that goes
on from row to row."""

LEAST_BLOCKS = {1: 4, 2: 3}
"""Blocks of one warpgroup that a multiprocessor has room for, by inputs; of a cluster of eight one
block fewer is enough."""
MOST_AT_ONCE = 24
"""Columns that a thread has of a chunk: more take registers that other blocks need."""

MOST_SCALE, MOST_SCALED_AT_ONCE = 64, 32
"""Numbers of a scale that a thread holds, and columns of a chunk beside them."""
LONGEST_OF_A_WARPGROUP = 6144
"""Columns of scaled rows; two warpgroups take longer ones, or parts."""

_LEAST_TILE = 256


def row_for(call: RowCall) -> Wide | Flat | None:
    """Tiles of rows of 16 bits that no single block's registers hold; None if others are faster, or
    nobody timed these: lengths that even tiles do not divide in bf16 alone.
    """
    fits = call.itemsize == 2 and call.over_inputs and LEAST_TIMED <= call.columns <= LONGEST_ROW
    if not fits or call.num_sums:
        return None
    if not call.num_vectors and call.columns % 2048 == 0 and call.columns > LONGEST_IN_BLOCK:
        wide = _wide(call)
        if wide is not None:
            return wide
    if call.num_masks or not call.may_cut or call.dtype != jnp.bfloat16:
        return None
    if call.num_vectors:
        return _scaled(call) if call.num_vectors == call.num_inputs == 1 else None
    if call.columns * call.column_bytes <= LONGEST_OF_A_WARP:
        return _of_a_warp(call)
    return _flat(call)


def _wide(call: RowCall) -> Wide | None:
    """A row to the fewest blocks of four warpgroups."""
    for cluster, most in (*((n, SHARE) for n in CLUSTERS), (CLUSTERS[-1], LARGEST_SHARE)):
        warps = cluster * 4 * WARPS
        share = call.columns // cluster * call.column_bytes
        tile = next((t for t in (512, 384, _LEAST_TILE) if call.columns % (warps * t) == 0), 0)
        if share > most or not tile:
            continue
        chunks = call.columns // (warps * tile)
        return Wide(
            cluster=cluster, tile=tile, chunks=chunks, slots=chunks, row_a_block=True,
            vector=8 if tile % 256 == 0 else 4,
        )  # fmt: skip
    return None


def _of_a_warp(call: RowCall) -> Flat:
    """A row to each warp of a warpgroup, in chunks that reach beyond it the least."""
    found = []
    for vector, chunks in itertools.product((8, 4, 2), (1, 2, 3)):
        unit = LANES * vector
        tile = -(-reach_of(Flat(group=0, vector=vector), call) // (chunks * unit)) * unit
        if tile // LANES > MOST_OF_A_WARP:
            continue
        c = Flat(group=0, tile=tile, chunks=chunks, slots=chunks, vector=vector, most_turns=1)
        if call.num_vectors * c.columns // LANES > MOST_SCALE_OF_A_WARP:
            if vector > 4:
                continue  # banks would conflict
            c = dataclasses.replace(c, in_memory=chunks)
        found.append(c)
    return min(found, key=lambda c: (c.columns, c.chunks, -c.vector))


def _flat(call: RowCall) -> Flat | None:
    """A row to the fewest blocks of one warpgroup that leave room for others."""
    blocks = LEAST_BLOCKS[call.num_inputs]
    for cluster, least in (*((n, blocks) for n in CLUSTERS), (CLUSTERS[-1], blocks - 1)):
        for c in _tiled(call, cluster=cluster, group=1, most=MOST_AT_ONCE):
            if blocks_fit(least, c, call):
                return dataclasses.replace(c, most_turns=1)
    return None


def _scaled(call: RowCall) -> Flat | None:
    """Two rows to the fewest blocks whose threads hold the scale."""
    if call.columns * call.itemsize <= LONGEST_OF_A_WARP_SCALED:
        return _of_a_warp(call)
    group = 1 if call.columns <= LONGEST_OF_A_WARPGROUP else 2
    for cluster in CLUSTERS:
        for c in _tiled(call, cluster=cluster, group=group, most=MOST_SCALED_AT_ONCE):
            if c.columns // (cluster * group * WARPGROUP) <= MOST_SCALE:
                return dataclasses.replace(c, most_turns=2)
    return None


def _tiled(call: RowCall, *, cluster: int, group: int, most: int) -> list[Flat]:
    """Chunks that together reach beyond a row, those first that do by little and in few pieces."""
    found = tiled(Flat(cluster=cluster, group=group), call, most=most)
    whole = (dataclasses.replace(c, slots=c.chunks) for c in found)
    return sorted(whole, key=lambda c: (_cost(c, call), c.vector))


def _cost(c: Flat, call: RowCall) -> float:
    """What is computed for nothing, as a part of a row; narrow vectors count as more.

    Pairs beside a scale do not: they take fewer registers, so that a third block fits (RMSNorm of
    80,098 columns: 92% of a copy's rate instead of 80).
    """
    narrower = NARROWER[4] if c.vector == 2 and call.num_vectors else NARROWER[c.vector]
    return computed_for_nothing(c, call) + narrower
