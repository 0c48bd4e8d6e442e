"""Rings of tiles in shared memory, filled by one warpgroup and multiplied by others."""

import jax
from jax import lax

from .mosaic import plgpu


def offer(empty, slots: int, *, group: jax.Array | int = 0, groups: int = 1) -> None:
    """Signals, before a warpgroup's first tile, that all slots of the ring are empty.

    Thus every request waits. Otherwise LLVM moves the first requests out of their loop. Of such
    requests ptxas (of CUDA 13.0 and of 13.5) sets coordinates too late: 14,336 x 4096, multiplied
    by tiles of 256 columns in 8 parts of K, was without every part's second tile.

    Args:
        empty: one barrier per slot, which signals that the slot is empty.
        groups: warpgroups that share the slots.
    """

    def arrive(turn, _):
        plgpu.barrier_arrive(empty.at[turn * groups + group])

    lax.fori_loop(0, slots // groups, arrive, None)
