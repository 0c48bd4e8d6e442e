"""What belongs to columns and is the same for all rows, such as a norm's scale, in ``flat``.

Dims: A part of a row in a warpgroup or a warp's row, M column of a tile.
"""

import itertools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .config import Flat, tile_layout


class Vectors:
    """Those of the first chunks in registers, the others in shared memory."""

    def __init__(self, c: Flat, vectors, smem, me, wg):
        self.c, self.smem, self.me = c, smem, me
        self.layout = tile_layout(c.vector)
        self.num_held = c.chunks - c.in_memory
        num_vectors = len(vectors)
        places = itertools.product(range(num_vectors), range(self.num_held))
        self.held = {(j, k): self._load(vectors[j].at[me.rank, me.wg, k]) for j, k in places}
        if not num_vectors or not c.in_memory:
            return

        @pl.when(wg == 0)
        def _():
            for j, member, k in itertools.product(
                range(num_vectors), range(c.members), range(c.in_memory)
            ):
                plgpu.copy_gmem_to_smem(
                    vectors[j].at[me.rank, member, self.num_held + k],
                    getattr(smem, f"vector{j}").at[member, k],
                    smem.vectors_full,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        plgpu.barrier_wait(smem.vectors_full)

    def of(self, chunk: int | jax.Array) -> Callable[[int], jax.Array]:
        """Loads vectors of a chunk, [A, M]."""
        if isinstance(chunk, int) and chunk < self.num_held:
            return lambda j: self.held[j, chunk]

        def load(j):
            ref = getattr(self.smem, f"vector{j}").at[self.me.wg, chunk - self.num_held]
            return self._load(ref)

        return load

    def _load(self, ref) -> jax.Array:
        if not self.c.by_warps:
            return plgpu.load(ref, layout=self.layout, optimized=False)
        x_M = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x_M, (WARPS, self.c.tile), [1])
