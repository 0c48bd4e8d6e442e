"""dQ in a pass of its own, for gradients that repeat bit by bit.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

The fused backward adds parts of dQ in the order in which blocks finish. Here a block owns 128
queries, 64 a warpgroup, keeps their dQ in registers and walks the key tiles in a fixed order: two
of the five matmuls are done twice for it. The fused kernels sum dK and dV in a fixed order anyway.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionSpec, BackwardOperands
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import column_layout, row_layout, swizzle_bytes, tiled

from .backward_block import kernel_operands
from .config import BARRIER_BYTES
from .kernel import AttentionKernel
from .tiles import TileRange, geometry_of, key_tiles

NUM_WARPGROUPS = 2
QUERIES = 64 * NUM_WARPGROUPS
KEYS = 64


def query_gradient(
    operands: BackwardOperands, *, spec: AttentionSpec, interpretable: bool = False
) -> jax.Array:
    """dQ [B, T, N, H], in the same order of additions each time."""
    arrays = kernel_operands(
        operands, q_tile=QUERIES, kv_tile=KEYS, by_keys=False, padded=interpretable
    )
    kernel = _QueryGradient(
        g=geometry_of(operands.q, operands.v), spec=spec, dtype=operands.q.dtype,
        q_tile=QUERIES, kv_tile=KEYS, segmented="ranges" in arrays, interpretable=interpretable,
        padded=interpretable,
    )  # fmt: skip
    q = arrays["q"]
    results = {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    dq = kernel.launch_by_queries(arrays, results, num_threads=NUM_WARPGROUPS + 1)["dq"]
    return dq[:, : kernel.g.T]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _QueryGradient(AttentionKernel):
    """The kernel of one call."""

    name: ClassVar[str] = "attention_query_gradient"

    @property
    def num_stages(self) -> int:
        width = 2 * (self.g.H + self.g.Hv)
        fixed = QUERIES * width + 4 * 3 * QUERIES + BARRIER_BYTES
        return 2 if fixed + 2 * KEYS * (width + 4) <= SMEM_BYTES else 1

    @property
    def tiling(self) -> Any:
        return tiled(swizzle_bytes(self.g.H, self.g.Hv))

    def scratch(self) -> dict:
        g, tile = self.g, self.tiling
        stages, with_ids = self.num_stages, 1 if self.segmented else 0
        buffers = {
            "q": plgpu.SMEM((1, QUERIES, g.H), self.dtype, transforms=tile),
            "do": plgpu.SMEM((1, QUERIES, g.Hv), self.dtype, transforms=tile),
            "lse": plgpu.SMEM((QUERIES,), jnp.float32),
            "delta": plgpu.SMEM((QUERIES,), jnp.float32),
            "k": plgpu.SMEM((stages, KEYS, g.H), self.dtype, transforms=tile),
            "v": plgpu.SMEM((stages, KEYS, g.Hv), self.dtype, transforms=tile),
            "q_full": plgpu.Barrier(num_arrivals=4 + with_ids),
            "full": plgpu.Barrier(num_arrivals=2 + with_ids, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=NUM_WARPGROUPS, num_barriers=stages),
        } | self.arrivals(2 * stages + 2)
        if self.segmented:
            buffers["q_ids"] = plgpu.SMEM((QUERIES,), jnp.int32)
            buffers["kv_ids"] = plgpu.SMEM((stages, KEYS), jnp.int32)
        if self.interpretable:
            buffers["ds"] = plgpu.SMEM((QUERIES, KEYS), self.dtype, transforms=tile)
        return buffers

    def run(self, gmem, smem) -> None:
        """One block: its tile's coordinates, then a role for each warpgroup."""
        g = self.g
        wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
        head = lax.rem(tile, g.B * g.N)
        q_tile = self.num_q_tiles - 1 - lax.div(tile, g.B * g.N)
        b, n = lax.div(head, g.N), lax.rem(head, g.N)
        q0 = q_tile * QUERIES
        keys = key_tiles(self.spec, g, q0, QUERIES, KEYS)
        if self.segmented:
            keys = keys.meet(gmem.ranges, b, q_tile)
        keys = keys.ordered(at_least_one=False)

        @pl.when(wg < NUM_WARPGROUPS)
        def _():
            plgpu.set_max_registers(240, action="increase")
            self.compute(gmem, smem, b, n, q0, keys)

        @pl.when(wg == NUM_WARPGROUPS)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            self.load(gmem, smem, b, n, q0, keys)

    def load(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """Queries once, then keys and values into the ring."""
        rows, kv_head, stages = pl.ds(q0, QUERIES), lax.div(n, self.g.group), self.num_stages
        self.make_arrivals(smem)
        self.load_tile(
            smem, self.odd_queries, gmem.q, (b, q0, n), smem.q.at[0], smem.q_full, 2 * stages
        )
        self.load_tile(
            smem, self.odd_queries, gmem.do, (b, q0, n), smem.do.at[0], smem.q_full, 2 * stages + 1
        )
        plgpu.copy_gmem_to_smem(gmem.lse.at[b, n, rows], smem.lse, smem.q_full)
        plgpu.copy_gmem_to_smem(gmem.delta.at[b, n, rows], smem.delta, smem.q_full)
        if self.segmented:
            plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, rows], smem.q_ids, smem.q_full)

        def step(j, _):
            slot, place = lax.rem(j - keys.lo, stages), (b, j * KEYS, kv_head)
            full = smem.full.at[slot]
            plgpu.barrier_wait(smem.empty.at[slot])
            self.load_tile(smem, self.odd_keys, gmem.k, place, smem.k.at[slot], full, slot)
            self.load_tile(smem, self.odd_keys, gmem.v, place, smem.v.at[slot], full, stages + slot)
            if self.segmented:
                rows = pl.ds(j * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(gmem.kv_ids.at[b, rows], smem.kv_ids.at[slot], full)

        lax.fori_loop(keys.lo, keys.hi, step, None)
        for slot in range(self.num_stages):
            plgpu.barrier_wait(smem.empty.at[slot])

    def compute(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """64 queries of a warpgroup."""
        wg = lax.axis_index("wg")
        mine = pl.ds(pl.multiple_of(wg * 64, 64), 64)
        for slot in range(self.num_stages):
            plgpu.barrier_arrive(smem.empty.at[slot])
        plgpu.barrier_wait(smem.q_full)
        for i in range(2):
            self.wait_tile(smem, self.odd_queries, 2 * self.num_stages + i, 0)
        dq = pl.run_scoped(
            functools.partial(self.accumulate, smem, q0 + wg * 64, mine, keys),
            plgpu.ACC((64, self.g.H), jnp.float32),
        )
        smem.q[0, mine, :] = (dq * self.spec.scale).astype(self.dtype)
        plgpu.commit_smem()
        self.store_tile(smem.q.at[0, mine], gmem.dq, (b, q0 + wg * 64, n))
        plgpu.wait_smem_to_gmem(0)

    def accumulate(self, smem, row0, mine, keys: TileRange, dq_acc):
        """The loop over key tiles."""
        lse = plgpu.load(smem.lse.at[mine], layout=row_layout())
        delta = plgpu.load(smem.delta.at[mine], layout=row_layout())
        q_ids = plgpu.load(smem.q_ids.at[mine], layout=row_layout()) if self.segmented else None

        def step(j, _):
            slot, only = lax.rem(j - keys.lo, self.num_stages), self.only(j)
            plgpu.barrier_wait(smem.full.at[slot])
            for which in (slot, self.num_stages + slot):
                self.wait_tile(smem, self.odd_keys, which, lax.div(j - keys.lo, self.num_stages))

            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, smem.q.at[only, mine], smem.k.at[slot].transpose((1, 0)))
                plgpu.wgmma(dp_acc, smem.do.at[only, mine], smem.v.at[slot].transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                p, slope = self.probabilities(s, lse, lse_dim=0)
                if self.masked:
                    mask = functools.partial(self.mask, smem, slot, row0, j, q_ids)
                    p = lax.cond(keys.is_whole(j), lambda p: p, mask, p)
                dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                ds = p * (dp - lax.broadcast_in_dim(delta, p.shape, [0]))
                return ds if slope is None else ds * slope

            scores = plgpu.ACC((64, KEYS), jnp.float32)
            ds = pl.run_scoped(products, scores, scores).astype(self.dtype)
            if self.interpretable:
                smem.ds[mine, :] = ds
                plgpu.commit_smem()
                plgpu.wgmma(dq_acc, smem.ds.at[mine], smem.k.at[slot])
            else:
                plgpu.wgmma(dq_acc, ds, smem.k.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(smem.empty.at[slot])

        lax.fori_loop(keys.lo, keys.hi, step, None)
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

    def mask(self, smem, slot, row0, j, q_ids, p):
        """0 where the query of a row does not see the key of a column."""
        aligned = row0 + self.g.diagonal - j * KEYS
        if self.segmented:
            kv_ids = plgpu.load(smem.kv_ids.at[slot], layout=column_layout())
            p = self.mask_ids(p, q_ids, kv_ids, fill=0.0)
        return self.mask_positions(p, aligned, j * KEYS, fill=0.0)
