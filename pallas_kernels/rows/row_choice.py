"""Which blocks take a row, two or four, and end: several of them share a multiprocessor.

One's writes overlap another's reads and exchange, as the hardware has it. That beats blocks that go
from row to row wherever nothing, or only RMSNorm's scale, is read again for each row: softmax of
102,440 columns has 98% of a copy's rate instead of 84 (an H100, norm/NOTES.md).
"""

import dataclasses
import itertools

import jax.numpy as jnp

from pallas_kernels.hopper.machine import LANES, WARPGROUP, WARPS

from .config import LONGEST_IN_BLOCK, LONGEST_ROW, Flat, Wide
from .flat_choice import CLUSTERS, NARROWER, computed_for_nothing, tiled
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
block fewer is enough if a row has no exponentials: log-softmax's gradient of 214,129 columns has
65% of a copy's rate so, 83 in blocks that go on from row to row (an H200)."""
MOST_AT_ONCE = 24
"""Columns that a thread has of a chunk: more take registers that other blocks need."""

LONGEST_OF_A_WARP_ALONE = 4608
"""Bytes of all inputs of a row that is a warp's, without anything that belongs to columns:
log-softmax's gradient of 1,032 columns has 96% of a copy's rate, 70 by warpgroups (an H200)."""
LONGEST_ASKED_ALONE = 4096
"""Columns of scaled rows of which a warpgroup asks for one at a time: more blocks fit."""
LAYER_NORM = 3072, 4096
"""Columns of LayerNorm's rows that are a warpgroup's: of 3,264 they reach 92% of a copy's rate, by
warpgroups of four that go on from row to row 82 (an H200); of 2,902 83 instead of 85."""

SCALED = (1, 2), (4, 1), (8, 1), (8, 2)
"""Blocks and their warpgroups that take rows longer than a warpgroup's, fewest threads first."""
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
        return _scaled(call) if call.num_inputs == 1 else None
    if call.columns * call.column_bytes <= LONGEST_OF_A_WARP_ALONE:
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
    tries = [(n, blocks) for n in CLUSTERS]
    if call.num_numbers == 1:
        tries.append((CLUSTERS[-1], blocks - 1))
    for cluster, least in tries:
        shape = Flat(cluster=cluster, group=1, most_turns=1)
        for c in _tiled(shape, call, most=MOST_AT_ONCE):
            if blocks_fit(least, c, call):
                return c
    return None


def _scaled(call: RowCall) -> Flat | None:
    """Rows to the fewest blocks whose threads hold what belongs to columns: two or four in turn, of
    which two are asked for at once.
    """
    if call.num_vectors > 1:
        shortest, longest = LAYER_NORM
        if not shortest <= call.columns <= longest:
            return None
        return _of_turns(Flat(group=1, most_turns=4), call)
    if call.columns * call.itemsize <= LONGEST_OF_A_WARP_SCALED:
        return _of_a_warp(call)
    if call.columns <= LONGEST_OF_A_WARPGROUP:
        rows = 2 if call.columns > LONGEST_ASKED_ALONE else 1
        return _of_turns(Flat(group=1, most_turns=2), call, rows=rows)
    found = (
        _of_turns(Flat(cluster=n, group=g, most_turns=2 if n == 1 else 4), call) for n, g in SCALED
    )
    return next((c for c in found if c is not None), None)


def _of_turns(shape: Flat, call: RowCall, *, rows: int = 2) -> Flat | None:
    """With slots for so many rows."""
    for c in _tiled(shape, call, most=MOST_SCALED_AT_ONCE, rows=rows):
        held = c.columns // (c.cluster * c.group * WARPGROUP) * call.num_vectors
        if held <= MOST_SCALE and blocks_fit(1, c, call):
            return c
    return None


def _tiled(shape: Flat, call: RowCall, *, most: int, rows: int = 1) -> list[Flat]:
    """Chunks that together reach beyond a row, those first that do by little and in few pieces, and
    slots for so many rows.
    """
    found = (dataclasses.replace(c, slots=rows * c.chunks) for c in tiled(shape, call, most=most))
    return sorted(found, key=lambda c: (_cost(c, call), -c.vector))


def _cost(c: Flat, call: RowCall) -> float:
    """What is computed for nothing, as a part of a row; narrow vectors count as more.

    Beside a scale pairs do not, unless four do as well.
    """
    narrower = NARROWER[4] if c.vector == 2 and call.num_vectors else NARROWER[c.vector]
    return computed_for_nothing(c, call) + narrower
