"""Ring buffers of tiles in shared memory, filled by one warpgroup and read by others."""

import jax
from jax import lax

from .mosaic import plgpu


def offer(empty, slots: int, *, group: jax.Array | int = 0, groups: int = 1) -> None:
    """Signals, before a warpgroup's first tile, that all slots of the ring are empty.

    So every TMA copy, even the first into a slot, waits on a barrier. Otherwise LLVM moves the
    first copies out of their loop, and ptxas (CUDA 13.0 and 13.5) sets their coordinates too late.
    A matmul of 14,336 x 4096 with tiles of 256 columns and K in 8 parts lost each part's second
    tile.

    Args:
        empty: one barrier per slot, which signals that the slot is empty.
        group, groups: index and number of the warpgroups that read alternate slots.
    """

    def arrive(turn, _):
        plgpu.barrier_arrive(empty.at[turn * groups + group])

    lax.fori_loop(0, slots // groups, arrive, None)
