"""Which chunks suit rows of a length that nothing divides, on a Hopper GPU.

In blocks that go on from row to row; ``row_choice`` has those that take one or two.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from pallas_kernels.hopper.machine import LANES, SMEM_BYTES, WARPGROUP, WARPS

from .config import LONGEST_IN_BLOCK, LONGEST_ROW, Flat
from .flat_order import in_periods, period_of, reach_of
from .formula import RowCall
from .smem import smem_bytes

SHORTEST = 256  # columns
LONGEST_OF_A_WARP = 4096
"""Bytes of all inputs, or as many of all vectors as if they were one, of rows that are a warp's."""

SHARED = {(1, 4): 0.0, (2, 2): 0.03, (4, 1): 0.06}
"""Warpgroups that share a row and teams of a block; what waiting for each other costs, as a part of
a row."""
TEAMS_OF_CLUSTERS = 2, 2
"""Likewise, of blocks that share rows of LayerNorm: one team computes while the other's numbers are
on their way, and a thread has twice the columns, so what it does once a row costs half as much."""

CLUSTERS = (1, 2, 4, 8)
"""Blocks that share a row, the fewest first."""

LEAD, SHORT_LEAD = 48 * 1024, 20 * 1024
"""Bytes that a block asks for ahead of the rows it works on, the fewer unless two inputs are all
that is read."""
SHORT = 0.1
"""What fewer than ``LEAD`` cost."""
LEAST_LEAD = 8 * 1024
"""Where nothing leaves more; there more is in registers than is fast."""
WAITING, WAITING_WITH_TWO_SUMS = 0.25, 0.5
"""What it costs if blocks that share a row could fold one ahead and have no room to: LayerNorm's
gradient of 125,184 columns has 36% of a copy's rate without and 76 with it."""
MOST_LEAD = 112 * 1024

MOST_BYTES = SMEM_BYTES - 1024
"""Of shared memory: a block that counted exactly ``SMEM_BYTES`` was refused at its launch, and what
the compiler adds to what is counted is not known; one of 1,000 bytes less ran."""

MOST_CHUNKS, MOST_WRITTEN_OUT = 32, 10
"""Of a warpgroup's share of a row; the fewer where they are written out one after another."""
MOST_AT_ONCE = 48
"""Columns that a thread has of a chunk."""
MOST_HELD, MOST_BESIDE_SUMS = 64, 56
"""Numbers that a thread holds from row to row, and if there are sums and vectors among them."""
MOST_OF_A_WARP = 40
"""Likewise, of vectors where a warp has a row."""
MOST_OF_TWO = 28
"""Columns that a thread has of rows with two vectors or two sums, unless eight blocks share one:
LayerNorm's gradient of 65,536 columns in four blocks spills (36% of a copy's rate, in eight 92)."""
LEAST_STEADY = 24
"""Columns of a thread from which LayerNorm's rows of whole words are faster without folding ahead,
where eight blocks share them: 98,304 columns 91 instead of 86%, 65,536 78 instead of 89."""
NARROWER = {8: 0.0, 4: 0.03, 2: 0.12}
"""What fewer elements at a time cost, as a part of a row that is computed for nothing."""
A_CHUNK = 2
"""What a chunk costs, likewise, in columns of each thread: it is reduced within a warp, waited for
and asked for."""


def flat_for(call: RowCall) -> Flat | None:
    """For formulas that can leave columns out, of inputs that are no masks; None if there are none.

    From ``SHORTEST`` columns on.
    """
    fits = call.may_cut and not call.num_masks and call.over_inputs
    if not fits or not SHORTEST <= call.columns <= LONGEST_ROW:
        return None
    per_row = call.columns * call.itemsize * max(call.num_inputs, call.num_vectors)
    if not call.num_sums and per_row <= LONGEST_OF_A_WARP:
        return _of_warps(call)
    least = LEAD if call.num_inputs > 1 and not call.num_vectors else SHORT_LEAD
    waiting = None
    tries = list(itertools.product((least, LEAST_LEAD), CLUSTERS))
    if call.num_sums > 1:  # fewer blocks that ask for less ahead are faster
        tries.sort(key=lambda each: each[1])
    for lead, cluster in tries:
        config = _cheapest(call, cluster, lead)
        if config is None:
            continue
        if not _waits(config, call):
            return config
        waiting = waiting or config
    return waiting


def _cheapest(call: RowCall, cluster: int, lead: int) -> Flat | None:
    """Of so many blocks that share a row."""
    ways = list(SHARED) if cluster == 1 else [(4, 1)]
    found = _cheapest_of(ways, call, cluster, lead)
    if cluster == 1 or call.num_inputs > 1 or call.num_vectors < 2:
        return found
    if found is not None and found.ahead and _is_whole(call):
        return found  # 46,992 columns 76% of a copy's rate, in teams 75
    return _cheapest_of([TEAMS_OF_CLUSTERS], call, cluster, lead) or found


def _cheapest_of(
    ways: Sequence[tuple[int, int]], call: RowCall, cluster: int, lead: int
) -> Flat | None:
    """Of these ways in which a block's warpgroups share rows, as in ``SHARED``."""
    found = [
        c
        for group, teams in ways
        for c in tiled(Flat(cluster=cluster, group=group, teams=teams), call)
    ]
    best, least = None, math.inf
    for c in sorted(found, key=lambda c: _cost(c, call)):
        if _cost(c, call) >= least:
            break  # room for its slots costs nothing or more
        filled = _filled(c, call, lead)
        if (
            filled is not None
            and (cost := _cost(filled, call) + _cost_of_slots(filled, call)) < least
        ):
            best, least = filled, cost
    return best


def _of_warps(call: RowCall) -> Flat:
    """A row to a warp, in one or two chunks."""
    vector = 16 // call.itemsize
    reach = reach_of(Flat(group=0, vector=vector), call)
    chunks = -(-reach // 1024)
    tile = -(-reach // (chunks * LANES * vector)) * LANES * vector
    if call.num_vectors * chunks * tile // LANES > MOST_OF_A_WARP:
        in_memory = chunks
        vector = min(vector, 4)  # banks would conflict
    else:
        in_memory = 0
    config = Flat(group=0, teams=4, tile=tile, chunks=chunks, vector=vector, in_memory=in_memory)
    for slots in range(6 * chunks, chunks, -1):
        if smem_bytes(filled := dataclasses.replace(config, slots=slots), call) <= MOST_BYTES:
            return filled
    raise AssertionError(f"a row and a chunk of {config} exceed shared memory")


def tiled(c: Flat, call: RowCall, *, most: int = MOST_AT_ONCE) -> Iterator[Flat]:
    """In chunks that together reach beyond a row by little.

    Args:
        most: columns that a thread has of a chunk.
    """
    num_parts = c.cluster * c.group * WARPS
    for vector in NARROWER:
        if vector * call.itemsize > 16:
            continue
        share = -(-reach_of(dataclasses.replace(c, vector=vector), call) // num_parts)
        unit = LANES * vector
        for chunks in range(1, MOST_CHUNKS + 1):
            units = -(-share // (unit * chunks))  # of a warp and chunk
            fits = units * vector <= most
            if fits and (chunks - 1) * units * unit < share:
                yield dataclasses.replace(c, tile=units * unit, chunks=chunks, vector=vector)


def _filled(c: Flat, call: RowCall, lead: int) -> Flat | None:
    """With vectors where they fit and slots as memory has; None if it has not."""
    a_chunk = c.tile // LANES
    sums = c.chunks * a_chunk * call.num_sums
    if sums > MOST_HELD:
        return None
    held = c.chunks
    if call.num_vectors:
        full = lead == LEAST_LEAD
        left = (MOST_BESIDE_SUMS if sums and not full else MOST_HELD) - sums
        held = min(max(left, 0) // (a_chunk * call.num_vectors), c.chunks)
        if held and c.cluster > 1 and c.teams > 1 and a_chunk > MOST_OF_TWO:
            return None  # spills
        if call.num_sums and held < c.chunks and not full:
            held = 0  # beside sums, half a scale in registers is slower than none
        if held < c.chunks and c.vector * 4 > 16:
            return None  # banks would conflict
        c = dataclasses.replace(c, in_memory=c.chunks - held)
        if (held or sums) and c.chunks > MOST_WRITTEN_OUT:
            return None
    chunk = _chunk_bytes(c, call)
    for ahead in (True, False) if _may_fold_ahead(c, call) else (False,):
        kept = c.chunks * (1 + ahead)
        if kept * chunk + lead > MOST_BYTES:
            continue
        filled = dataclasses.replace(c, ahead=ahead, slots=kept + -(-lead // chunk))
        left = MOST_BYTES - smem_bytes(filled, call)
        if left < 0:
            continue
        most = min(filled.slots + left // chunk, kept + -(-MOST_LEAD // chunk))
        if c.cluster > 1 and c.teams > 1:
            most = min(most, c.teams * c.chunks)  # more are slower
        fuller = (dataclasses.replace(filled, slots=n) for n in range(most, filled.slots, -1))
        return next((each for each in fuller if smem_bytes(each, call) <= MOST_BYTES), filled)
    return None


def _is_whole(call: RowCall) -> bool:
    """Whether every row begins with a word."""
    return call.columns % (16 // call.itemsize) == 0


def _may_fold_ahead(c: Flat, call: RowCall) -> bool:
    """Beside sums of two inputs, for a third leaves no registers; see ``LEAST_STEADY``. Teams
    overlap as they are.
    """
    if c.cluster == 1 or c.teams > 1 or (call.num_sums and not _is_lean(call)):
        return False
    steady = c.cluster == 8 and _is_whole(call) and _columns_of_a_thread(c) >= LEAST_STEADY
    return not (call.num_vectors > 1 and steady)


def _waits(c: Flat, call: RowCall) -> bool:
    """Whether more blocks are faster than these: such as can fold a row ahead, which these cannot,
    or whose registers hold LayerNorm's scale and bias.
    """
    if call.columns <= LONGEST_IN_BLOCK:
        return False
    if _is_layer_norm(call):
        if c.cluster < 8 and c.group == 4 and _columns_of_a_thread(c) > MOST_OF_TWO:
            return True
        if call.num_sums:
            return not c.ahead and (c.cluster == 1 or _may_fold_ahead(c, call))
        return c.group == 4 and c.in_memory > 0
    if not call.has_columns:
        return call.num_inputs == 1 and c.cluster < 8
    could = _is_lean(call) or (call.num_vectors == 1 and not call.num_sums)
    if c.ahead or not could:
        return False
    if not call.num_sums:
        return c.cluster > 2
    return c.cluster > 1 or c.in_memory == c.chunks


def _columns_of_a_thread(c: Flat) -> int:
    return c.chunks * c.tile // LANES


def _is_layer_norm(call: RowCall) -> bool:
    """Or its gradient."""
    return call.num_vectors > 1 or call.num_sums > 1


def _is_lean(call: RowCall) -> bool:
    """Sums over rows as norms' gradients without a residual have them."""
    return call.num_inputs == 2 and call.num_sums > 0 and call.itemsize == 2


def computed_for_nothing(c: Flat, call: RowCall) -> float:
    """Or as if it were, as a part of a row."""
    chunks = A_CHUNK * c.chunks * c.cluster * c.group * WARPGROUP
    return (c.columns + chunks) / call.columns - 1


def _cost(c: Flat, call: RowCall) -> float:
    """What is computed for nothing, or could be meanwhile, as a part of a row."""
    apart = NARROWER[c.vector] + SHARED[c.group, c.teams]
    idle = c.num_clusters / in_periods(c.num_clusters, period_of(c, call)) - 1
    return computed_for_nothing(c, call) + apart + idle


def _cost_of_slots(c: Flat, call: RowCall) -> float:
    """What too few slots add to it."""
    waits = _may_fold_ahead(c, call) and not c.ahead
    waiting = WAITING_WITH_TWO_SUMS if call.num_sums > 1 else WAITING
    lead = (c.slots - c.chunks * (1 + c.ahead)) * _chunk_bytes(c, call)
    return waiting * waits + SHORT * (lead < LEAD)


def _chunk_bytes(c: Flat, call: RowCall) -> int:
    """Of a block."""
    return c.warpgroups * WARPS * c.tile * call.num_inputs * call.itemsize
