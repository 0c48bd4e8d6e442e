"""Fused flash attention backward for heads wider than 128, split over columns instead of keys.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

dK and dV of 64 keys by 256 columns fill the registers of two warpgroups. So both work on the same
64 keys, and each owns half the columns of dK, dV and dQ. Warpgroup 0 computes the scores and P,
warpgroup 1 computes dO V' and dS; each hands its result to the other through shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionSpec, BackwardOperands
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import (
    LOG2E,
    column_layout,
    row_layout,
    soft_cap,
    swizzle_bytes,
    tile_layout,
    tiled,
)

from .backward_block import BackwardKernel, kernel_operands, split_heads
from .config import BARRIER_BYTES
from .tiles import TileRange, geometry_of, have_ids

KEYS = QUERIES = 64
NUM_STAGES = 2
LEAST_DQ_COLUMNS = 32  # of dQ that leave at a time, where more do not fit in shared memory


def backward(
    operands: BackwardOperands, *, spec: AttentionSpec, interpretable: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of q, k and v for heads wider than 128 or values narrower than keys.

    Half of each width must be a multiple of 32.
    """
    g, parts = split_heads(geometry_of(operands.q, operands.v), KEYS)
    # Beside ids, shared memory has no room for barriers of odd tiles.
    segmented = have_ids(operands.masks)
    padded = interpretable or segmented
    arrays = kernel_operands(operands, q_tile=QUERIES, kv_tile=KEYS, padded=padded)
    kernel = _ByColumns(
        g=g, parts=parts, spec=spec, dtype=operands.q.dtype,
        q_tile=QUERIES, kv_tile=KEYS, segmented=segmented, interpretable=interpretable,
        padded=padded,
    )  # fmt: skip
    return kernel.gradients(arrays, num_threads=3)  # two compute, one loads


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ByColumns(BackwardKernel):
    """Backward kernel of one call for wide heads."""

    name: ClassVar[str] = "attention_backward"

    @property
    def half(self) -> int:
        """Number of columns of queries and keys that each warpgroup owns."""
        return self.g.H // 2

    @property
    def half_values(self) -> int:
        """Number of columns of values that each warpgroup owns."""
        return self.g.Hv // 2

    @property
    def in_registers(self) -> bool:
        """Whether products take P and dS from registers, where there is room for them."""
        return self.half < 128 and not self.interpretable

    @property
    def chunk(self) -> int:
        """Number of columns of dQ that are held in registers at a time."""
        return self.half if self.half < 128 else 64

    @property
    def dq_columns(self) -> int:
        """Number of columns of dQ sent at a time: a chunk where shared memory has room."""
        return self.chunk if self.smem_bytes(self.chunk) <= SMEM_BYTES else LEAST_DQ_COLUMNS

    def smem_bytes(self, dq_columns: int) -> int:
        """Returns a block's bytes of shared memory if it sends ``dq_columns`` columns at a time."""
        operands = (1 + NUM_STAGES) * 64 * (self.g.H + self.g.Hv) + 2 * KEYS * QUERIES
        rows = 2 * NUM_STAGES * QUERIES + (NUM_STAGES + 1) * QUERIES  # statistics and ids
        return 2 * operands + 4 * rows + 4 * 2 * QUERIES * dq_columns + BARRIER_BYTES

    @property
    def tiling(self) -> Any:
        # One swizzle for both operands of a product, and so for all.
        return tiled(swizzle_bytes(self.half, self.half_values))

    def scratch(self) -> dict:
        g, tile = self.g, self.tiling
        buffers = {
            "k": plgpu.SMEM((1, KEYS, g.H), self.dtype, transforms=tile),
            "v": plgpu.SMEM((1, KEYS, g.Hv), self.dtype, transforms=tile),
            "q": plgpu.SMEM((NUM_STAGES, QUERIES, g.H), self.dtype, transforms=tile),
            "do": plgpu.SMEM((NUM_STAGES, QUERIES, g.Hv), self.dtype, transforms=tile),
            "rows": plgpu.SMEM((2, NUM_STAGES, QUERIES), jnp.float32),
            "p": plgpu.SMEM((KEYS, QUERIES), self.dtype, transforms=tile),
            "ds": plgpu.SMEM((KEYS, QUERIES), self.dtype, transforms=tile),
            "dq": plgpu.SMEM(
                (2, QUERIES, self.dq_columns), jnp.float32, transforms=tiled(128, itemsize=4)
            ),
            "kv_full": plgpu.Barrier(num_arrivals=3 if self.segmented else 2),
            "full": plgpu.Barrier(num_arrivals=5 if self.segmented else 4, num_barriers=NUM_STAGES),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=NUM_STAGES),
            "p_ready": plgpu.Barrier(),
            "ds_ready": plgpu.Barrier(),
            "done": plgpu.Barrier(num_arrivals=2),
        } | self.arrivals(2 * NUM_STAGES + 2)
        if self.segmented:
            # Of the queries in each stage, and last of the keys: two buffers would not fit.
            buffers["ids"] = plgpu.SMEM((NUM_STAGES + 1, QUERIES), jnp.int32)
        return buffers

    def run(self, gmem, smem) -> None:
        """Runs one block: its tile's coordinates, then a role for each warpgroup."""
        wg = lax.axis_index("wg")
        b, kv_head, k_tile, queries = self.place(gmem)

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(240, action="increase")
            for w in range(2):  # written out: each has its own part, and addresses are constants

                @pl.when(wg == w)
                def _(w=w):
                    self.compute(gmem, smem, w, b, kv_head, k_tile, queries)

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            self.load(gmem, smem, b, kv_head, k_tile * KEYS, queries)

    def load(self, gmem, smem, b, kv_head, k0, queries: TileRange) -> None:
        """Loads keys and values once, then the queries of each head of the group into the ring."""
        g = self.g
        self.make_arrivals(smem)
        self.load_keys(gmem, smem, b, kv_head, k0, 2 * NUM_STAGES)
        if self.segmented:
            keys = pl.ds(k0, KEYS)
            plgpu.copy_gmem_to_smem(gmem.kv_ids.at[b, keys], smem.ids.at[NUM_STAGES], smem.kv_full)
        per_head = jnp.maximum(queries.hi - queries.lo, 1)

        def step(it, _):
            # One query tile more than there are: its first product is computed and dropped.
            n = kv_head * g.group + jnp.minimum(lax.div(it, per_head), g.group - 1)
            slot = lax.rem(it, NUM_STAGES)
            i = jnp.maximum(queries.hi - 1 - lax.rem(it, per_head), 0)
            rows, place = pl.ds(i * QUERIES, QUERIES), (b, i * QUERIES, n)
            full = smem.full.at[slot]
            plgpu.barrier_wait(smem.empty.at[slot])
            self.load_tile(smem, self.odd_queries, gmem.q, place, smem.q.at[slot], full, slot)
            self.load_tile(
                smem, self.odd_queries, gmem.do, place, smem.do.at[slot], full, NUM_STAGES + slot
            )
            for kind, row in enumerate((gmem.lse, gmem.delta)):
                plgpu.copy_gmem_to_smem(row.at[b, n, rows], smem.rows.at[kind, slot], full)
            if self.segmented:
                plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, rows], smem.ids.at[slot], full)

        lax.fori_loop(0, (queries.hi - queries.lo) * g.group + 1, step, None)
        for i in range(NUM_STAGES):
            plgpu.barrier_wait(smem.empty.at[i])

    def compute(self, gmem, smem, wg: int, b, kv_head, k_tile, queries: TileRange) -> None:
        """Computes half the columns of dK and dV of 64 keys over all queries, and writes them."""
        for i in range(NUM_STAGES):
            plgpu.barrier_arrive(smem.empty.at[i])
        self.wait_keys(smem, 2 * NUM_STAGES)
        dk, dv = pl.run_scoped(
            functools.partial(self.accumulate, gmem, smem, wg, b, kv_head, k_tile, queries),
            plgpu.ACC((KEYS, self.half), jnp.float32),
            plgpu.ACC((KEYS, self.half_values), jnp.float32),
        )
        # K and V are read no more: the gradients take their space, and go out in one piece each.
        plgpu.barrier_arrive(smem.done)
        plgpu.barrier_wait(smem.done)
        smem.k[0, :, self.mine(wg)] = (dk * self.spec.scale).astype(self.dtype)
        smem.v[0, :, self.my_values(wg)] = dv.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.done)
        plgpu.barrier_wait(smem.done)
        whole, gradient = ((smem.k.at[0], gmem.dk), (smem.v.at[0], gmem.dv))[wg]
        self.store_tile(whole, gradient, (b, k_tile * KEYS, kv_head))
        plgpu.wait_smem_to_gmem(0)

    def mine(self, wg: int):
        """Returns the slice of columns of queries and keys that a warpgroup owns."""
        return pl.ds(wg * self.half, self.half)

    def my_values(self, wg: int):
        """Returns the slice of columns of values that a warpgroup owns."""
        return pl.ds(wg * self.half_values, self.half_values)

    def accumulate(
        self, gmem, smem, wg: int, b, kv_head, k_tile, queries: TileRange, dk_acc, dv_acc
    ):
        """The loop over heads of the group and query tiles, from the last: under a causal mask the
        blocks of a head then read the same tiles at the same time.
        """
        per_head = queries.hi - queries.lo

        def first_product(it, meanwhile=_nothing):
            """Scores in warpgroup 0, dO V' in warpgroup 1; both keys by queries."""
            slot = lax.rem(it, NUM_STAGES)
            plgpu.barrier_wait(smem.full.at[slot])
            for which in (slot, NUM_STAGES + slot):
                self.wait_tile(smem, self.odd_queries, which, lax.div(it, NUM_STAGES))
            left, right = ((smem.k, smem.q), (smem.v, smem.do))[wg]
            right = right.at[slot].transpose((1, 0))
            return _product((KEYS, QUERIES), left.at[self.only(it)], right, meanwhile)

        def step(before, x, head):
            it, i = head * per_head + before, queries.hi - 1 - before
            slot, only = lax.rem(it, NUM_STAGES), self.only(it)
            row = plgpu.load(smem.rows.at[wg, slot], layout=column_layout())
            do_smem = smem.do.at[slot, :, self.my_values(wg)]
            if wg == 0:
                p = self.write_p(smem, slot, x, row, i, k_tile, queries)
            else:
                plgpu.barrier_wait(smem.p_ready)
                p = plgpu.load(smem.p, layout=tile_layout())
            plgpu.wgmma(dv_acc, p if self.in_registers else smem.p, do_smem)
            left = smem.ds  # of dK
            if wg == 1:
                ds = self.score_gradient(smem, slot, p, x, row).astype(self.dtype)
                smem.ds[...] = ds
                plgpu.commit_smem()
                left = ds if self.in_registers else left
            if not self.in_registers:
                plgpu.wgmma_wait(0)
            if wg == 0:
                plgpu.barrier_wait(smem.ds_ready)
            else:
                plgpu.barrier_arrive(smem.ds_ready)  # and P may be overwritten
            plgpu.wgmma(dk_acc, left, smem.q.at[slot, :, self.mine(wg)])
            n = kv_head * self.g.group + head
            leave = self.parts_of_dq(gmem, smem, wg, only, b, n, i, k_tile)
            plgpu.barrier_arrive(smem.empty.at[slot])
            return first_product(it + 1, leave)

        def one_head(head, x):
            return lax.fori_loop(0, per_head, functools.partial(step, head=head), x)

        lax.fori_loop(0, self.g.group, one_head, first_product(jnp.int32(0)))
        plgpu.barrier_arrive(smem.empty.at[lax.rem(per_head * self.g.group, NUM_STAGES)])
        return (
            plgpu.wgmma_accumulator_load(dk_acc, wait_n=0),
            plgpu.wgmma_accumulator_load(dv_acc, wait_n=0),
        )

    def parts_of_dq(self, gmem, smem, wg: int, only, b, n, i, k_tile) -> Callable[[], None]:
        """Computes this warpgroup's columns of dQ part by part, and returns what sends the last."""
        leave = _nothing
        for start in range(wg * self.half, (wg + 1) * self.half, self.chunk):
            # A part of dQ leaves while the next is computed, the last one with the next tile.
            right = smem.k.at[only, :, pl.ds(start, self.chunk)]
            dq = _product((QUERIES, self.chunk), smem.ds.transpose((1, 0)), right, leave)
            leave = functools.partial(self.add_to_dq, gmem, smem, wg, dq, b, n, i, k_tile, start)
        return leave

    def write_p(self, smem, slot, s, lse, i, k_tile, queries: TileRange) -> jax.Array:
        """Writes P to shared memory, for both warpgroups, and returns it."""
        if self.spec.logit_soft_cap is None:
            s = s * (self.spec.scale * LOG2E)
        else:
            s = soft_cap(s, self.spec.scale, self.spec.logit_soft_cap) * LOG2E
        p = jnp.exp2(s - lax.broadcast_in_dim(lse, s.shape, [1]))
        if self.masked:
            mask = functools.partial(self.mask, smem, slot, i, k_tile)
            p = lax.cond(queries.is_whole(i), lambda p: p, mask, p)
        p = p.astype(self.dtype)
        smem.p[...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.p_ready)
        return p

    def score_gradient(self, smem, slot, p, dp, delta):
        """Computes dS = P (dP - delta), through the soft cap if there is one."""
        p = p.astype(jnp.float32)
        ds = p * (dp - lax.broadcast_in_dim(delta, dp.shape, [1]))
        cap = self.spec.logit_soft_cap
        if cap is None:
            return ds
        # The scores are in the other warpgroup, but their logarithm is in P: log2 P = S - logsumexp
        # to 2**-9, so that tanh = S / cap is known better than P itself.
        lse = lax.broadcast_in_dim(
            plgpu.load(smem.rows.at[0, slot], layout=column_layout()), dp.shape, [1]
        )
        tanh = (jnp.log2(p) + lse) * (1.0 / (cap * LOG2E))
        return jnp.where(p == 0.0, 0.0, ds * (1.0 - tanh * tanh))

    def mask(self, smem, slot, i, k_tile, p):
        """Puts 0 where the query of a column does not see the key of a row."""
        if self.segmented:
            q_ids = plgpu.load(smem.ids.at[slot], layout=column_layout())
            kv_ids = plgpu.load(smem.ids.at[NUM_STAGES], layout=row_layout())
            p = self.mask_ids(p, q_ids, kv_ids, fill=0.0, by_keys=True)
        key0 = k_tile * KEYS
        aligned = key0 - self.g.diagonal - i * QUERIES
        return self.mask_positions(p, aligned, key0, fill=0.0, by_keys=True)

    def add_to_dq(self, gmem, smem, wg: int, dq, b, n, i, k_tile, column: int) -> None:
        """Adds ``chunk`` columns of a tile's dQ to the float32 sum in global memory."""
        width = self.dq_columns
        for start in range(0, self.chunk, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem.dq[wg] = lax.slice(dq, (0, start), (QUERIES, start + width))
            plgpu.commit_smem()
            index = (b, pl.ds(i * QUERIES, QUERIES), n, pl.ds(column + start, width))
            self.send_dq(smem.dq.at[wg], gmem, k_tile, index)


def _nothing() -> None:
    pass


def _product(shape: tuple[int, int], a, b, meanwhile) -> jax.Array:
    """``a @ b``, with ``meanwhile()`` done while it runs."""

    def body(acc):
        plgpu.wgmma(acc, a, b)
        meanwhile()
        return plgpu.wgmma_accumulator_load(acc, wait_n=0)

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
