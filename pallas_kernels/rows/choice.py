"""Which way suits rows of a length on a Hopper GPU, and which tiles."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper.machine import LANES, NUM_PROCESSORS, SMEM_BYTES, WARPS

from .config import (
    LONGEST_IN_BLOCK,
    LONGEST_ROW,
    LONGEST_WHOLE_ROW,
    Blocks,
    Flat,
    Odd,
    RowConfig,
    Stream,
    Twice,
    Wide,
)
from .flat_choice import flat_for
from .formula import RowCall
from .row_choice import LEAST_TIMED, row_for
from .smem import SMEM_PROCESSOR_BYTES, blocks_fit, smem_bytes

STREAM_RESERVE = 3 * 1024
"""Left free, as in the forms that were measured: 8,192 columns in two stages, not three."""

MOST_HELD = 64
"""Numbers that a thread holds from row to row; more spill."""

MOST_BESIDE_SUMS = 48
"""Of these, if there are sums and vectors among them."""

LEAST_LEAD, MOST_LEAD = 80 * 1024, 96 * 1024
"""Bytes that a block reads ahead of the row it works on; one of eight, the widest rows, a slot."""

SHORT_LEAD = 48 * 1024
"""Instead, in one of four, or where sums over rows or nothing but a row fill a block, and a slot
where vectors do: more blocks cost more than that (norm/NOTES.md)."""

MOST_BARRIERS = 32
"""Of one kind in Pallas: one for each slot of each warpgroup."""

MOST_TILES = 16
"""Of a part, that are written out one after another."""

ODD_WARPGROUPS = (1, 2, 4, 8)
MOST_KEPT = 40
"""Columns of all inputs that a thread of ``odd`` keeps in registers."""
MOST_KEPT_BY_FOUR = 24
"""Instead, where four warpgroups share a row: with 40, softmax of 19,999 columns had 42% of a
copy's rate, in shared memory 69 to 74%."""
MOST_KEPT_BESIDE_SUMS = 16
"""Of one input, if there are sums."""
LEAST_IN_WINDOWS = 50_000
"""Columns of rows, of two inputs or more, that windows read faster: 1.11 to 1.21x from 50,257 on,
0.73 to 1.16x below 20,000; of one input 0.82 to 1.06x (``odd-rows-h200.json``)."""

LONGEST_OF_A_BLOCK = 32_768
LONGEST_FLAT_LAYER_NORM, LONGEST_FLAT_NORM = 114_688, 131_072
"""Columns, of lengths that even tiles divide: registers of eight blocks hold what is theirs."""

type OddForm = Literal["flat", "columns", "windows"]

MOST_ODD = 2**31 - 1
"""Elements of an array whose odd rows lie one after another: their places are int32."""


def config_for(rows: int, call: RowCall, *, form: OddForm | None = None) -> RowConfig:
    """Tiles for rows of a dtype of 16 or 32 bits: by the copy engine, or straight from memory.

    Args:
        form: of rows that no even tile divides: "flat" through the copy engine as they lie between
            words, which takes others too; "columns" or aligned "windows" through registers (see
            ``odd``); None: what was timed and is faster.

    Raises:
        UnsupportedError: there are none.
    """
    try:
        even = _even(rows, call) if form is None else None
        refusal = None
    except UnsupportedError as error:
        even, refusal = None, error
    if isinstance(even, Blocks):
        return even
    few = rows * call.columns <= MOST_ODD
    alone = row_for(call) if form is None and rows else None
    if isinstance(alone, Wide) or (alone is not None and few):
        return alone
    if isinstance(even, Wide) and few and _is_faster_flat(call):
        return flat_for(call) or even
    if even is not None and not isinstance(even, Twice):
        return even
    config = _of_any_length(rows, call, form, instead=even) if rows else None
    if config is None:
        raise refusal or _refused(f"{rows} rows of {call.columns} columns do not go by {form}")
    if config is not even and rows * call.columns > MOST_ODD:
        raise _refused(
            f"{rows} rows of {call.columns} columns are more than {MOST_ODD} elements, the most of "
            "rows that no tile divides,"
        )
    return config


def _of_any_length(
    rows: int, call: RowCall, form: OddForm | None, *, instead: Twice | None
) -> Flat | Odd | Twice | None:
    """Tiles of a form, or of the fastest that was timed; ``instead`` of such as read rows twice."""
    if form == "flat":
        alone = row_for(call)
        return alone if isinstance(alone, Flat) else flat_for(call)
    if form is None:
        flat = flat_for(call) if _is_timed(call) else None
        if instead is not None:
            # 53,248 columns, percent of a copy's rate: RMSNorm 83 instead of 30, its gradient 77
            # instead of 25; softmax's gradient of 120,832 97 instead of 44.
            return flat if flat is not None and rows * call.columns <= MOST_ODD else instead
        if flat is not None:
            return flat
        form = "windows" if call.num_inputs > 1 and call.columns >= LEAST_IN_WINDOWS else "columns"
    return _odd(rows if form == "windows" else 1, call)


def _is_faster_flat(call: RowCall) -> bool:
    """Of norms whose rows even tiles divide, in more than one block each (an H100; of a copy's
    rate): LayerNorm of 65,536 columns 89 instead of 83%, of 98,304 91 instead of 83, its gradient
    92 instead of 88 and 80, RMSNorm's of 81,920 92 instead of 77; but LayerNorm of 131,072 86
    instead of 88.
    """
    if not call.num_vectors or not _is_timed(call):
        return False
    if call.num_sums > 1:
        return LONGEST_OF_A_BLOCK <= call.columns <= LONGEST_FLAT_LAYER_NORM
    longest = LONGEST_FLAT_LAYER_NORM if call.num_vectors > 1 else LONGEST_FLAT_NORM
    return LONGEST_OF_A_BLOCK < call.columns <= longest


def _is_timed(call: RowCall) -> bool:
    """Whether a GPU has timed ``flat`` rows like these, whatever their number: of bf16, and not
    norms with a residual.
    """
    if call.dtype != jnp.bfloat16 or call.columns < LEAST_TIMED:
        return False
    if not call.num_vectors:
        return True
    return call.num_inputs <= (2 if call.num_sums else 1)


def _even(rows: int, call: RowCall) -> RowConfig:
    """Tiles that divide a row.

    Columns: multiples of 32 to 1024, where rows come in fours; of 128 to 4096, and to 8192 where
    nothing is streamed; of 256 to 8192; of 2048 to 262,144.

    32 columns of a row to a thread leave registers for everything else; sums over rows take as many
    again, so there it is 16. Whatever shared memory remains is read-ahead.

    Raises:
        UnsupportedError: there are none.
    """
    columns = call.columns
    if rows == 0 or not 0 < columns <= LONGEST_ROW:
        raise _refused(
            f"{rows} rows of {columns} columns: there must be rows, of 1 to {LONGEST_ROW} columns,"
        )
    if columns > LONGEST_IN_BLOCK:
        return _wide(call)
    batch = 0
    if columns <= LONGEST_WHOLE_ROW:
        most = LONGEST_WHOLE_ROW // columns
        batch = next((r for r in range(most, 0, -1) if rows % (WARPS * r) == 0), 0)
        if not batch:
            raise _refused(f"{rows} rows of {columns} columns are not a multiple of {WARPS} rows")
    in_block = call.num_sums == 0 and call.num_inputs * columns <= LONGEST_IN_BLOCK
    group = 1 if in_block or columns <= 4096 else 2
    lanes = LANES if batch else group * WARPS * LANES
    # 16 bytes at a time, but for fp32 vectors in shared memory, whose banks would conflict.
    widest = 4 if call.num_vectors and not in_block else 16 // call.itemsize
    vector = next((v for v in (8, 4, 2, 1) if v <= widest and columns % (lanes * v) == 0), 0)
    if not vector:
        raise _refused(f"{columns} columns are not a multiple of {lanes}")
    if in_block:
        return Blocks(rows_per_warp=batch, vector=vector, most_turns=2 if call.num_vectors else 1)
    if not call.over_inputs:
        return _wide(call)
    config = Stream(rows_per_warp=batch, group=group, vector=vector)
    if call.num_sums and group == 1 and columns // config.num_parts > 512:
        # 32 columns a thread of inputs, vector and sums spill out of 128 registers: 64% of a copy's
        # rate with 4 warpgroups, 90% with 3.
        config = dataclasses.replace(config, num_warpgroups=3)
    streamed = _with_stages(config, call)
    if streamed is None and columns % 2048 == 0:
        return _wide(call)
    while streamed is None:
        config = dataclasses.replace(config, num_warpgroups=config.num_warpgroups - group)
        streamed = _with_stages(config, call)
    return streamed


def _odd(rows: int, call: RowCall) -> Odd | None:
    """Tiles of which the last overlaps: in registers, or in the memory of half a multiprocessor.

    Vectors divide so many rows together. For formulas that can leave columns out, of 128 columns
    on. None if there are none.
    """
    fits = call.may_cut and not call.num_masks and call.over_inputs
    if not fits or not WARPS * LANES <= call.columns <= LONGEST_ROW:
        return None
    most = MOST_KEPT // call.num_inputs
    if call.num_sums:
        most = MOST_KEPT_BESIDE_SUMS // call.num_sums
    for warpgroups in ODD_WARPGROUPS:
        if warpgroups > 2 and not call.num_sums:
            most = min(most, MOST_KEPT_BY_FOUR // call.num_inputs)
        config = _odd_tiles(rows, call, warpgroups, most_in_turn=most)
        if config.tiles * config.tile // LANES <= most and (warpgroups < 8 or call.num_sums):
            blocks = max(1, 4 // warpgroups)
            return dataclasses.replace(config, most_workers=blocks * NUM_PROCESSORS)
    if call.num_sums:
        return None
    for share, warpgroups in ((2, 4), (1, 8)):
        config = _odd_tiles(rows, call, warpgroups, most_in_turn=16 // call.num_inputs)
        slot = warpgroups * config.columns * call.num_inputs * call.itemsize
        for in_memory in range(min(config.tiles, SMEM_PROCESSOR_BYTES // share // slot), 0, -1):
            kept = dataclasses.replace(config, in_memory=in_memory)
            if blocks_fit(share, kept, call):
                if share == 1 or in_memory == config.tiles:
                    return kept
                break
    raise AssertionError("what does not fit is read again")


def _odd_tiles(rows: int, call: RowCall, warpgroups: int, *, most_in_turn: int) -> Odd:
    """The tiles that reach beyond a row the least, of so many columns a thread at most.

    Vectors divide these rows together, so that the last row's window ends with the array; beside
    sums they divide a row, for sums of shifted columns would not belong together.
    """
    columns = call.columns
    vector = math.gcd(columns if call.num_sums else rows * columns, 16 // call.itemsize)
    while WARPS * LANES * vector > columns:
        vector //= 2

    def tiled(vector: int, turns: int) -> Odd:
        config = Odd(warpgroups=warpgroups, tile=LANES * vector * turns, tiles=1, vector=vector)
        tiles = -(-config.window(columns) // (warpgroups * config.columns))
        return dataclasses.replace(config, tiles=tiles)

    def fits(c: Odd) -> bool:
        """Whether only the last tiles may reach beyond a row, wherever its window begins."""
        return (c.tiles - 1) * c.warpgroups * c.columns <= columns

    while True:
        most = max(1, min(most_in_turn // vector, columns // (WARPS * LANES * vector)))
        found = [c for c in (tiled(vector, turns) for turns in range(most, 0, -1)) if fits(c)]
        if found:
            return min(found, key=lambda c: c.tiles * c.tile)
        vector //= 2


def _with_stages(config: Stream, call: RowCall) -> Stream | None:
    """With as many stages as fit, six at most; None if there are not two, to read ahead."""
    for num_stages in range(6, 1, -1):
        fitting = dataclasses.replace(config, num_stages=num_stages)
        if smem_bytes(fitting, call) <= SMEM_BYTES - STREAM_RESERVE:
            return fitting
    return None


def _wide(call: RowCall) -> Wide | Twice:
    """The fewest blocks a row, where vectors and sums leave registers and read-ahead enough."""
    if call.columns % 2048:
        raise _refused(f"{call.columns} columns are not a multiple of 2048")
    for cluster in (1, 2, 4, 8):
        config = _held(call, cluster)
        if config is not None:
            return config
    return _twice(call)


def _alone(call: RowCall) -> bool:
    """Whether a row, and masks of it, is all that is read, as by softmax."""
    return call.num_inputs == 1 and not call.num_vectors


def _held(call: RowCall, cluster: int) -> Wide | None:
    """A row in the shared memory of a cluster of so many blocks, if it fits."""
    warps = cluster * 4 * WARPS
    tile = _tile(call, warps)
    num_tiles, a_tile = call.columns // (warps * tile) if tile else 0, tile // LANES
    if not 0 < num_tiles <= MOST_TILES:
        return None
    sums = num_tiles * a_tile * call.num_sums
    if sums > MOST_HELD:
        return None
    held = num_tiles
    # RMSNorm's gradient, measured so: 92% of a copy at 32,768 columns where none is held has 88%.
    lean = call.num_inputs == 2 and call.num_sums == 1 and call.itemsize == 2
    if call.num_vectors:
        left = max((MOST_BESIDE_SUMS if sums and not lean else MOST_HELD) - sums, 0)
        held = min(left // (a_tile * call.num_vectors), num_tiles)
    if call.num_sums and held < num_tiles:
        held = 0  # beside sums, half a scale in registers is slower than none
    tiles = 2 if call.num_inputs == 1 and num_tiles % 2 == 0 and held == num_tiles else 1
    config = Wide(
        cluster=cluster, tile=tile, tiles=tiles, chunks=num_tiles // tiles,
        in_memory=num_tiles - held, vector=_vector(call, tile, in_memory=held < num_tiles),
    )  # fmt: skip
    slot = call.column_bytes * tiles * 4 * WARPS * tile
    alone = _alone(call)
    least = SHORT_LEAD if alone or call.num_sums or cluster == 4 else LEAST_LEAD
    if cluster == 8 or (call.num_inputs == 1 and not alone):
        least = slot
    fewest = config.chunks + -(-least // slot)
    most = 6
    if call.num_inputs == 1:
        # Of softmax's 131,072 columns 6 slots are no slower than 7.
        most = max(6, config.chunks + -(-(SHORT_LEAD if alone else MOST_LEAD) // slot))
    may_fold_ahead = cluster > 1 and call.num_turns == 1 and (call.num_sums == 0 or lean)
    for slots in range(min(most, MOST_BARRIERS // 4), fewest - 1, -1):
        ahead = may_fold_ahead and slots > 2 * config.chunks
        fitting = dataclasses.replace(config, slots=slots, ahead=ahead)
        if smem_bytes(fitting, call) <= SMEM_BYTES:
            return fitting
    return None


def _twice(call: RowCall) -> Twice:
    """In the most blocks that divide a row, so that the fewest rows wait in L2 to be read again."""
    cluster = next(n for n in (8, 4, 2, 1) if call.columns % (n * 4 * WARPS * 128) == 0)
    tile = _tile(call, cluster * 4 * WARPS)
    config = Twice(
        cluster=cluster, tile=tile, chunks=call.columns // (cluster * 4 * WARPS * tile),
        vector=_vector(call, tile, in_memory=False),
    )  # fmt: skip
    for slots in range(6, 1, -1):
        fitting = dataclasses.replace(config, slots=slots)
        if smem_bytes(fitting, call) <= SMEM_BYTES:
            return fitting
    raise AssertionError(f"two slots of {config} exceed shared memory")


def _tile(call: RowCall, warps: int) -> int:
    """Columns of a warp's part at a time, at most a KB of them; 0 if none divides."""
    sizes = (size for size in (512, 384, 256, 128) if size * call.itemsize <= 1024)
    return next((size for size in sizes if call.columns % (warps * size) == 0), 0)


def _vector(call: RowCall, tile: int, *, in_memory: bool) -> int:
    """16 bytes, but for fp32 vectors in shared memory, whose banks would conflict."""
    return 16 // call.itemsize if tile % 256 == 0 and not in_memory else 4


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(f"{why} in the Hopper kernels over rows; plain JAX takes any")
