"""Rings of tiles in shared memory, filled by one warpgroup and multiplied by others."""

import jax
from jax import lax

from .mosaic import plgpu


def offer(empty, slots: int, *, group: jax.Array | int = 0, groups: int = 1) -> None:
    """Signals, before a warpgroup's first tile, that all slots of the ring are empty.

    So every TMA copy waits on a barrier. If the first copies did not, LLVM would move them out of
    their loop, and ptxas (CUDA 13.0 and 13.5) would set their coordinates too late: a matmul of
    14,336 x 4096 with tiles of 256 columns and K in 8 parts lost each part's second tile.

    Args:
        empty: one barrier per slot, which signals that the slot is empty.
        groups: warpgroups that share the slots.
    """

    def arrive(turn, _):
        plgpu.barrier_arrive(empty.at[turn * groups + group])

    lax.fori_loop(0, slots // groups, arrive, None)
