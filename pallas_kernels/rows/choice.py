"""The choice of the row kernel's tile sizes by row length, on a Hopper GPU.

Percentages in comments are of a plain copy's rate on an H200.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper.machine import LANES, WARPGROUP, WARPS

from .config import NUM_CLUSTERS, RowConfig, blocks_fit
from .formula import RowCall

SHORTEST, LONGEST = 256, 262_144
"""Fewest and most columns of rows that are split over warps."""
LONGEST_WHOLE, LONGEST_WHOLE_SUMMED = 1024, 512
"""Most columns of rows that one warp holds whole; the second limit is for rows with sums."""

BLOCKS = {1: 4, 2: 3}
"""One-warpgroup blocks that must fit on an SM, by number of inputs, without vectors and sums."""
MOST_AT_ONCE = 24
"""Most columns of a chunk per thread in that case: more take registers that other blocks need."""
LONGEST_OF_TURNS = 1536
"""Most columns of rows of which a block computes two, if the formula has exponentials."""

SHARED = (1, 1), (1, 2), (1, 4), (4, 1), (8, 1), (8, 2)
"""Blocks per cluster and warpgroups per block for rows with vectors, fewest threads first."""
MOST_HELD, MOST_HELD_AT_ONCE = 64, 32
"""Most elements of vectors per thread in registers, and most columns of a chunk with them."""

SUMMED = {2560: (1, 1), 5120: (1, 2), 12288: (1, 4), 28672: (2, 4), 57344: (4, 4), LONGEST: (8, 4)}
"""Blocks per cluster and warpgroups per block for rows up to a length. Here sums, or LayerNorm's
scale and bias, stay in registers from row to row."""
SHORT = 1280
"""Most columns of rows for which an SM runs six blocks in that case."""
MOST_SUMS, MOST_BESIDE_SUMS = 64, (48, 96)
"""Most elements of two sums per thread, and of sums and vectors together. The second limit is
higher for eight blocks per row, although registers spill (131,072 columns 80 instead of 55)."""

NARROWER = {8: 0.0, 4: 0.03, 2: 0.12}
"""Cost of fewer elements per access, as a fraction of a row."""
A_CHUNK = 2
"""Cost of a chunk in columns per thread: its copy, a wait and a reduction."""
MOST_CHUNKS, MOST_WRITTEN_OUT = 16, 10
"""Most chunks of a row per warpgroup; the second limit is for loops that are unrolled."""


def config_for(rows: int, call: RowCall) -> RowConfig:
    """Returns the row kernel's tile sizes for ``rows`` rows of a 16-bit or 32-bit dtype.

    Raises:
        UnsupportedError: no tiles fit such rows.
    """
    columns = call.columns
    if rows == 0 or not 0 < columns <= LONGEST:
        raise _refused(
            f"{rows} rows of {columns} columns: there must be rows, of 1 to {LONGEST} columns,"
        )
    if whole := _whole(rows, call):
        return whole
    if columns < SHORTEST:
        if columns % LANES:
            raise _refused(f"{columns} columns are not a multiple of {LANES}")
        raise _refused(f"{rows} rows of {columns} columns are not a multiple of {WARPS} rows")
    if columns % call.word and rows * columns % call.word:
        raise _refused(f"{rows} rows of {columns} columns are no multiple of {call.word} elements")
    if call.num_masks and columns % 16:
        raise _refused(f"{columns} columns of a mask are not a multiple of 16")
    if call.num_sums:
        found = _persistent(call)
    else:
        found = _of_turns(call) if call.num_vectors else _of_blocks(call)
    if found is None:
        raise _refused(
            f"{call.num_inputs} inputs and {call.num_sums} sums of {columns} columns of "
            f"{call.dtype} do not fit"
        )
    return found


def _whole(rows: int, call: RowCall) -> RowConfig | None:
    """Config with several whole rows per warp, up to 1,024 columns, if they divide all rows."""
    columns = call.columns
    longest = LONGEST_WHOLE_SUMMED if call.num_sums else LONGEST_WHOLE
    vector = math.gcd(columns // LANES, call.word) if columns % LANES == 0 else 0
    fitting = (n for n in range(longest // columns, 0, -1) if rows % (WARPS * n) == 0)
    batch = next(fitting, 0)
    if not vector or not batch:
        return None
    c = RowConfig(rows_per_warp=batch, tile=columns, vector=vector)
    if call.num_sums:
        return dataclasses.replace(c, turns=0, workers=4 * NUM_CLUSTERS[1], slots=2)
    return dataclasses.replace(c, turns=2, slots=2) if call.num_vectors else c


def _of_blocks(call: RowCall) -> RowConfig | None:
    """Rows that a cluster takes one of, and ends, in blocks that leave room for others."""
    blocks, powers = BLOCKS[call.num_inputs], call.num_numbers > 1
    turns = 2 if powers and call.columns <= LONGEST_OF_TURNS else 1

    def filled(cluster: int, group: int, least: int) -> RowConfig | None:
        shape = RowConfig(cluster=cluster, group=group, turns=turns)
        tiled = _tiled(shape, call, most=MOST_AT_ONCE)
        each = (dataclasses.replace(c, slots=turns * c.chunks) for c in tiled)
        return next((c for c in each if blocks_fit(least, c, call)), None)

    several = [c for cluster in NUM_CLUSTERS if (c := filled(cluster, 1, blocks))]
    if several:
        return min(several, key=lambda c: _cost(c, call))
    few = [(8, 2, 2)] if powers else [(8, 1, 2), (8, 2, 1)]
    return next(filter(None, (filled(*shape) for shape in few)), None) or _persistent(call)


def _of_turns(call: RowCall) -> RowConfig | None:
    """Rows that a cluster takes a few of, as its threads hold what belongs to columns."""
    for cluster, group in SHARED:
        if cluster > 1 and call.num_vectors > 1:
            break
        turns = 2 * call.num_vectors * (1 if cluster == 1 else 2)
        shape = RowConfig(cluster=cluster, group=group, turns=turns)
        for c in _tiled(shape, call, most=MOST_HELD_AT_ONCE):
            held = c.chunks * c.tile // LANES * call.num_vectors
            filled = dataclasses.replace(c, slots=2 * c.chunks)
            if held <= MOST_HELD and blocks_fit(1, filled, call):
                return filled
    return _persistent(call)


def _persistent(call: RowCall) -> RowConfig | None:
    """Rows that as many clusters as run at once take in turn, in the fewest blocks."""
    shapes = (shape for longest, shape in SUMMED.items() if call.columns <= longest)
    return next(filter(None, (_in_turn(call, *shape) for shape in shapes)), None)


def _in_turn(call: RowCall, cluster: int, group: int) -> RowConfig | None:
    """Config with clusters that take rows one after another, folding a row ahead if they can."""
    blocks = 6 if call.columns <= SHORT else 4 // group
    if group == 1 and call.num_inputs + call.num_sums > 4 and call.columns > SHORT:
        blocks = 3
    shape = RowConfig(cluster=cluster, group=group, turns=0, workers=blocks * NUM_CLUSTERS[cluster])
    tiled = [_with_vectors(c, call) for c in _tiled(shape, call, most=MOST_HELD_AT_ONCE)]
    may_fold_ahead = cluster > 1 and call.num_inputs < 3  # a third leaves no registers
    for ahead in (True, False) if may_fold_ahead else (False,):
        for c in filter(None, tiled):
            fewest = c.chunks * (1 + ahead) + 1
            for slots in range(max(2 * c.chunks, fewest), fewest - 1, -1):
                filled = dataclasses.replace(c, slots=slots, ahead=ahead)
                if blocks_fit(blocks, filled, call):
                    return filled
    return None


def _with_vectors(c: RowConfig, call: RowCall) -> RowConfig | None:
    """Config with vectors in registers beside sums, or shared memory; None if sums do not fit."""
    a_chunk = c.tile // LANES
    sums, vectors = (c.chunks * a_chunk * n for n in (call.num_sums, call.num_vectors))
    if sums > MOST_SUMS or (sums + vectors and c.chunks > MOST_WRITTEN_OUT):
        return None
    most = MOST_HELD
    if call.num_sums > 1:
        most = MOST_BESIDE_SUMS[c.cluster == 8 and call.num_inputs < 3]
        if call.num_inputs > 2 and (c.cluster, c.group) in ((1, 2), (1, 4)):
            most = sums  # 8,192 columns 98 instead of 86
    if sums + vectors <= most:
        return c
    # Half a scale in registers is slower than none beside sums.
    held = 0 if sums else most // (a_chunk * call.num_vectors)
    if c.vector > 4:
        return None  # banks of shared memory would conflict
    return dataclasses.replace(c, in_memory=c.chunks - held)


def _tiled(shape: RowConfig, call: RowCall, *, most: int) -> list[RowConfig]:
    """Chunks that together reach beyond a row by little, cheapest first.

    Args:
        most: columns that a thread has of a chunk.
    """
    reach = call.columns + call.word - math.gcd(call.columns, call.word)
    share = -(-reach // shape.num_parts)

    def made() -> Iterator[RowConfig]:
        for vector, chunks in itertools.product(NARROWER, range(1, MOST_CHUNKS + 1)):
            unit = LANES * vector
            units = -(-share // (unit * chunks))  # of a warp and chunk
            fits = vector <= call.word and units * vector <= most
            if fits and (chunks - 1) * units * unit < share:
                yield dataclasses.replace(shape, tile=units * unit, chunks=chunks, vector=vector)

    return sorted(made(), key=lambda c: (_cost(c, call), -c.vector))


def _cost(c: RowConfig, call: RowCall) -> float:
    """Relative cost of padding columns, chunks and narrow accesses, as a part of a row."""
    chunks = A_CHUNK * c.chunks * c.cluster * c.group * WARPGROUP
    return (c.columns + chunks) / call.columns - 1 + NARROWER[c.vector]


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"{why} in the Hopper kernels over rows; plain JAX takes any")
