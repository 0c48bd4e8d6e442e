"""Rings of tiles in shared memory, between a warpgroup that copies and those that multiply."""

import jax
from jax import lax

from .mosaic import plgpu


def offer(empty, slots: int, *, group: jax.Array | int = 0, groups: int = 1) -> None:
    """Says that a warpgroup's slots are empty, before its first tile: every request has a wait.

    Without it the first requests would have none, and LLVM takes them out of their loop. Of such
    requests ptxas (of CUDA 13.0 and of 13.5) sets coordinates too late: 14,336 x 4096, multiplied
    by tiles of 256 columns in 8 parts of K, was without every part's second tile.

    Args:
        empty: a barrier for each slot.
        groups: warpgroups that share the slots.
    """

    def arrive(turn, _):
        plgpu.barrier_arrive(empty.at[turn * groups + group])

    lax.fori_loop(0, slots // groups, arrive, None)
