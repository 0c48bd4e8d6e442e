"""Which boxes suit rows of a length that nothing divides, on a Hopper GPU."""

import dataclasses
import itertools
from collections.abc import Iterator

from pallas_kernels.hopper.machine import LANES, SMEM_BYTES, WARPS

from .config import LONGEST_ROW, Boxes
from .flat import LINE
from .formula import RowCall
from .smem import smem_bytes

LONGEST_OF_A_WARP = 2048
"""Columns of all inputs, and of all vectors, of rows that are a warp's."""

SHARED = ((1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 4, 1), (4, 4, 1), (8, 4, 1))
"""Blocks and warpgroups that share a row, teams of a block: the fewest that hold a row come first,
so that the fewest wait for each other."""

LEADS = (48 * 1024, 24 * 1024)
"""Bytes that a block asks for ahead of the rows it works on: the first if any form leaves so many."""
MOST_LEAD = 112 * 1024

MOST_CHUNKS = 16
MOST_TILES = 16
"""Of a warpgroup's share of a row, that are written out one after another."""
MOST_AT_ONCE = 24
"""Columns of all inputs that a thread has in registers at a time."""
MOST_HELD, MOST_BESIDE_SUMS = 64, 48
"""Numbers that a thread holds from row to row, and if there are sums and vectors among them."""
NARROW = 0.02
"""What half a vector at a time costs, as a part of a row that is read for nothing."""


def boxes_for(call: RowCall) -> Boxes | None:
    """For formulas that can leave columns out, of inputs that are no masks; None if there are none.

    Columns from a line on.
    """
    fits = call.has_neutral and not call.num_masks and call.over_inputs
    if not fits or not LINE <= call.columns <= LONGEST_ROW:
        return None
    per_row = call.columns * max(call.num_inputs, call.num_vectors)
    if not call.num_sums and per_row <= LONGEST_OF_A_WARP:
        return _of_warps(call)
    for lead, (cluster, group, teams) in itertools.product(LEADS, SHARED):
        shared = Boxes(cluster=cluster, group=group, teams=teams)
        found = [c for each in _tiled(shared, call) if (c := _filled(each, call, lead)) is not None]
        if found:
            return min(found, key=lambda c: _cost(c, call))
    return None


def _of_warps(call: RowCall) -> Boxes:
    """A row to a warp, in one or two tiles."""
    tiles = -(-call.columns // 1024)
    tile = -(-call.columns // (tiles * LINE)) * LINE
    vector = min(8, 16 // call.itemsize)
    config = Boxes(group=0, teams=4, tile=tile, tiles=tiles, vector=vector)
    for slots in range(6, 1, -1):
        if smem_bytes(filled := dataclasses.replace(config, slots=slots), call) <= SMEM_BYTES:
            return filled
    raise AssertionError(f"two slots of {config} exceed shared memory")


def _tiled(c: Boxes, call: RowCall) -> Iterator[Boxes]:
    """In chunks and tiles that reach beyond a row by little."""
    share = -(-call.columns // (c.cluster * c.group * WARPS))
    for vector, chunks in itertools.product((8, 4), range(1, MOST_CHUNKS + 1)):
        if vector * call.itemsize > 16:
            continue
        unit = LANES * vector
        units = -(-share // (unit * chunks))  # of a warp and chunk
        if (chunks - 1) * units * unit >= share:
            continue
        most = max(1, MOST_AT_ONCE // (vector * call.num_inputs))
        wide = max(n for n in range(1, most + 1) if units % n == 0)
        tiled = dataclasses.replace(
            c, tile=wide * unit, tiles=units // wide, chunks=chunks, vector=vector
        )
        if chunks * tiled.tiles <= MOST_TILES:
            yield tiled


def _filled(c: Boxes, call: RowCall, lead: int) -> Boxes | None:
    """With vectors where they fit and slots as memory has; None if it has not."""
    num_tiles, a_tile = c.chunks * c.tiles, c.tile // LANES
    sums = num_tiles * a_tile * call.num_sums
    if sums > MOST_HELD:
        return None
    if call.num_vectors:
        left = (MOST_BESIDE_SUMS if sums else MOST_HELD) - sums
        held = min(max(left, 0) // (a_tile * call.num_vectors), num_tiles)
        if call.num_sums and held < num_tiles:
            held = 0  # beside sums, half a scale in registers is slower than none
        if held < num_tiles and c.vector * 4 > 16:
            return None  # banks would conflict
        c = dataclasses.replace(c, in_memory=num_tiles - held)
    chunk = c.warpgroups * c.piece * call.num_inputs * call.itemsize
    fewest, most = (c.chunks + 1 + -(-size // chunk) for size in (lead, MOST_LEAD))
    may_fold_ahead = c.cluster > 1 and call.num_turns_cut == 1 and call.num_sums == 0
    for slots in range(most, fewest - 1, -1):
        ahead = may_fold_ahead and slots > 2 * c.chunks
        filled = dataclasses.replace(c, slots=slots, ahead=ahead)
        if smem_bytes(filled, call) <= SMEM_BYTES:
            return filled
    return None


def _cost(c: Boxes, call: RowCall) -> float:
    """What is computed for nothing, as a part of a row; chunks by what their number costs."""
    return c.columns / call.columns - 1 + NARROW * (c.vector < 8) + 0.002 * c.chunks * c.tiles
