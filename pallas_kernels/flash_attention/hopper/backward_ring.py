"""How a backward by keys is fed: the loading warpgroup's part, and what the others wait for.

Dims: as in ``backward_by_keys``.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu

from .backward_block import FusedKernel
from .config import BACKWARD_KEYS as KEYS
from .config import BACKWARD_QUERIES as QUERIES
from .config import BackwardConfig
from .tiles import TileRange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueryRing(FusedKernel):
    """A kernel whose queries, and what belongs to them, come through ``num_stages`` slots."""

    c: BackwardConfig

    def load(self, gmem, smem, b, kv_head, k_tile, queries: TileRange) -> None:
        """Keys and values once, then the queries of each head of the group into the ring."""
        g, c = self.g, self.c
        self.make_arrivals(smem)
        self.load_keys(gmem, smem, b, kv_head, k_tile * KEYS, 2 * c.num_stages)
        if self.segmented:
            keys = pl.ds(k_tile * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(gmem.kv_ids.at[b, keys], smem.kv_ids, smem.kv_full)
        per_head = queries.hi - queries.lo
        count = per_head * g.group

        def step(it, _):
            # One query tile more than there are: its scores are computed and dropped.
            head = jnp.minimum(lax.div(it, jnp.maximum(per_head, 1)), g.group - 1)
            i = queries.lo + lax.rem(it, jnp.maximum(per_head, 1))
            n, slot = kv_head * g.group + head, lax.rem(it, c.num_stages)
            rows, place = pl.ds(i * QUERIES, QUERIES), (b, i * QUERIES, n)
            full = smem.q_full.at[slot]
            plgpu.barrier_wait(smem.q_empty.at[slot])
            self.load_tile(smem, self.odd_queries, gmem.q, place, smem.q.at[slot], full, slot)
            plgpu.copy_gmem_to_smem(gmem.lse.at[b, n, rows], smem.lse.at[slot], full)
            if self.segmented:
                plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, rows], smem.q_ids.at[slot], full)

            @pl.when(it < count)
            def _():
                full = smem.do_full.at[slot]
                plgpu.barrier_wait(smem.do_empty.at[slot])
                self.load_tile(
                    smem,
                    self.odd_queries,
                    gmem.do,
                    place,
                    smem.do.at[slot],
                    full,
                    c.num_stages + slot,
                )
                plgpu.copy_gmem_to_smem(gmem.delta.at[b, n, rows], smem.delta.at[slot], full)

        lax.fori_loop(0, count + 1, step, None)
        for i in range(c.num_stages):  # the last uses of each slot
            plgpu.barrier_wait(smem.q_empty.at[i])
            plgpu.barrier_wait(smem.do_empty.at[i])

    def wait_queries(self, smem, it) -> None:
        """Until the queries of the it-th tile are there."""
        stages = self.c.num_stages
        slot = lax.rem(it, stages)
        plgpu.barrier_wait(smem.q_full.at[slot])
        self.wait_tile(smem, self.odd_queries, slot, lax.div(it, stages))
