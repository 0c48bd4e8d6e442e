"""Fused flash attention backward for Hopper: per key tile one loop over queries, five matmuls.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

A block owns 128 keys of one key/value head, 64 per warpgroup. Their dK and dV stay in registers
over all query heads of the group. Scores are computed transposed, keys by queries. So P and dS can
stay in registers as left operands of the products ``dV += P dO`` and ``dK += dS Q``. dQ sums over
key tiles and so over blocks: TMA adds it to a float32 array in global memory, in no fixed order.
There are two forms:

- late: both warpgroups store dS in shared memory. One tile later, when neither has to wait for the
  other, each computes half the columns of that tile's dQ. The next scores are computed while TMA
  adds this dQ.
- ``dq_warpgroup``: a third warpgroup computes dQ, and the next scores are computed during dO V'.
  Only heads of width 64 leave enough registers.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionSpec, BackwardOperands
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import column_layout, row_layout, swizzle_bytes, tile_layout, tiled

from .backward_block import BackwardKernel, kernel_operands, split_heads
from .config import BACKWARD_KEYS as KEYS
from .config import BACKWARD_QUERIES as QUERIES
from .config import NUM_DS, BackwardConfig
from .tiles import TileRange, geometry_of

NUM_WARPGROUPS = KEYS // 64
"""Number of computing warpgroups, each with 64 keys of the tile."""


def backward(
    operands: BackwardOperands,
    *,
    spec: AttentionSpec,
    config: BackwardConfig,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dq, dk and dv; dk and dv are summed over the query heads of a kv head.

    Args:
        operands: forward's operands, results and cotangents; all heads of one width up to 128.
        spec: the forward call's static part.
        config: tiles.
        interpretable: avoids what the interpreter lacks: matmul operands in registers and copies
            that add. dQ is then summed over key tiles afterwards.
    """
    g, parts = split_heads(geometry_of(operands.q, operands.v), KEYS)
    arrays = kernel_operands(operands, q_tile=QUERIES, kv_tile=KEYS, padded=interpretable)
    kernel = _ByKeys(
        g=g, parts=parts, spec=spec, c=config,
        dtype=operands.q.dtype, q_tile=QUERIES, kv_tile=KEYS, segmented="ranges" in arrays,
        interpretable=interpretable, padded=interpretable, own_copies=config.own_copies,
    )  # fmt: skip
    loading = 2 if config.dq_warpgroup else 1  # and one for dQ
    return kernel.gradients(arrays, num_threads=NUM_WARPGROUPS + loading)


class _Keys(NamedTuple):
    """The 64 keys of a warpgroup, the query tiles that see them, and sums of their gradients."""

    wg: int
    b: Any
    kv_head: Any
    k_tile: Any
    queries: TileRange
    kv_ids: Any
    dk_acc: Any
    dv_acc: Any

    @property
    def mine(self) -> Any:
        """Slice of this warpgroup's keys among the rows of the block's key tile."""
        return pl.ds(self.wg * 64, 64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ByKeys(BackwardKernel):
    """Backward kernel of one call; query tiles come through a ring of ``num_stages`` slots."""

    name: ClassVar[str] = "attention_backward"

    c: BackwardConfig

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Shape of the part of dQ that is sent to global memory at a time: all columns or half."""
        return (QUERIES, self.g.H if self.c.dq_warpgroup else self.g.H // NUM_WARPGROUPS)

    @property
    def tiling(self) -> Any:
        """Tiling and swizzle of an operand's tile in shared memory."""
        # A warpgroup's columns of dQ must be whole swizzle atoms of K.
        return tiled(swizzle_bytes(self.dq_shape[1], self.g.Hv, QUERIES))

    def scratch(self) -> dict:
        """Returns a block's shared memory buffers and barriers, by name."""
        g, c, tile = self.g, self.c, self.tiling
        rows = (c.num_stages, QUERIES)
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        with_ids = 3 if self.segmented else 2
        buffers = {
            "q": plgpu.SMEM((*rows, g.H), self.dtype, transforms=tile),
            "do": plgpu.SMEM((*rows, g.Hv), self.dtype, transforms=tile),
            "lse": plgpu.SMEM(rows, jnp.float32),
            "delta": plgpu.SMEM(rows, jnp.float32),
            "k": plgpu.SMEM((1, KEYS, g.H), self.dtype, transforms=tile),
            "v": plgpu.SMEM((1, KEYS, g.Hv), self.dtype, transforms=tile),
            "ds": plgpu.SMEM((NUM_DS, KEYS, QUERIES), self.dtype, transforms=tile),
            "kv_full": plgpu.Barrier(num_arrivals=with_ids),
            "q_full": ring(num_arrivals=with_ids),
            "do_full": ring(num_arrivals=2),
            "q_empty": ring(num_arrivals=NUM_WARPGROUPS),
            "do_empty": ring(num_arrivals=NUM_WARPGROUPS),
            "ds_ready": plgpu.Barrier(num_arrivals=NUM_WARPGROUPS, num_barriers=NUM_DS),
            "ds_empty": plgpu.Barrier(
                num_arrivals=1 if c.dq_warpgroup else NUM_WARPGROUPS, num_barriers=NUM_DS
            ),
            "done": plgpu.Barrier(num_arrivals=NUM_WARPGROUPS),
        } | self.arrivals(2 * c.num_stages + 2)
        f32_tile = tiled(swizzle_bytes(self.dq_shape[1], itemsize=4), itemsize=4)
        dq = (NUM_WARPGROUPS, *self.dq_shape)
        buffers["dq"] = plgpu.SMEM(dq, jnp.float32, transforms=f32_tile)
        if self.segmented:
            buffers["q_ids"] = plgpu.SMEM(rows, jnp.int32)
            buffers["kv_ids"] = plgpu.SMEM((KEYS,), jnp.int32)
        if self.interpretable:
            buffers["p"] = plgpu.SMEM((KEYS, QUERIES), self.dtype, transforms=tile)
        return buffers

    def run(self, gmem, smem) -> None:
        """Runs one block: its tile's coordinates, then a role for each warpgroup."""
        c, wg = self.c, lax.axis_index("wg")
        b, kv_head, k_tile, queries = self.place(gmem)

        # Written out per warpgroup: addresses that depend on it are constants, and the loop has the
        # registers for the rest.
        @pl.when(wg < NUM_WARPGROUPS)
        def _():
            plgpu.set_max_registers(208 if c.dq_warpgroup else 240, action="increase")
            for w in range(NUM_WARPGROUPS):

                @pl.when(wg == w)
                def _(w=w):
                    self.compute(gmem, smem, w, b, kv_head, k_tile, queries)

        @pl.when(wg == NUM_WARPGROUPS)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            self.load(gmem, smem, b, kv_head, k_tile, queries)

        if c.dq_warpgroup:

            @pl.when(wg == NUM_WARPGROUPS + 1)
            def _():
                plgpu.set_max_registers(72, action="decrease")
                self.query_gradients(gmem, smem, b, kv_head, k_tile, queries)

    def load(self, gmem, smem, b, kv_head, k_tile, queries: TileRange) -> None:
        """Loads keys and values once, then the queries of each head of the group into the ring."""
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
        """Waits until the it-th visited query tile is in shared memory."""
        stages = self.c.num_stages
        slot = lax.rem(it, stages)
        plgpu.barrier_wait(smem.q_full.at[slot])
        self.wait_tile(smem, self.odd_queries, slot, lax.div(it, stages))

    def compute(self, gmem, smem, wg: int, b, kv_head, k_tile, queries: TileRange) -> None:
        """Computes dK and dV of a warpgroup's 64 keys over all queries, and writes them."""
        g = self.g
        mine = pl.ds(wg * 64, 64)
        for i in range(self.c.num_stages):
            plgpu.barrier_arrive(smem.q_empty.at[i])
            plgpu.barrier_arrive(smem.do_empty.at[i])
        self.wait_keys(smem, 2 * self.c.num_stages)
        dk, dv = pl.run_scoped(
            functools.partial(self.accumulate, gmem, smem, wg, b, kv_head, k_tile, queries),
            plgpu.ACC((64, g.H), jnp.float32),
            plgpu.ACC((64, g.Hv), jnp.float32),
        )
        if not self.c.dq_warpgroup:
            # Both warpgroups have read all of K for their parts of dQ: its space is free.
            plgpu.barrier_arrive(smem.done)
            plgpu.barrier_wait(smem.done)
        smem.k[0, mine, :] = (dk * self.spec.scale).astype(self.dtype)
        smem.v[0, mine, :] = dv.astype(self.dtype)
        plgpu.commit_smem()
        place = (b, k_tile * KEYS + wg * 64, kv_head)
        self.store_tile(smem.k.at[0, mine], gmem.dk, place)
        self.store_tile(smem.v.at[0, mine], gmem.dv, place)
        plgpu.wait_smem_to_gmem(0)

    def accumulate(
        self, gmem, smem, wg: int, b, kv_head, k_tile, queries: TileRange, dk_acc, dv_acc
    ):
        """Loops over the group's heads and query tiles, and sums dK and dV."""
        g, c, mine = self.g, self.c, pl.ds(wg * 64, 64)
        kv_ids = plgpu.load(smem.kv_ids.at[mine], layout=row_layout()) if self.segmented else None
        keys = _Keys(wg, b, kv_head, k_tile, queries, kv_ids, dk_acc, dv_acc)
        per_head = queries.hi - queries.lo

        def first_scores(s_acc):
            self.issue_scores(smem, keys, s_acc, 0)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        def one_head(head, carry):
            def one_tile(i, carry):
                it = head * per_head + i - queries.lo
                return self.step(gmem, smem, keys, it, i, head, carry)

            return lax.fori_loop(queries.lo, queries.hi, one_tile, carry)

        def any_tile(it, carry):
            i, head, carry = carry
            return *queries.after(i, head), self.step(gmem, smem, keys, it, i, head, carry)

        def last_dq(dq_acc):
            self.issue_dq(smem, wg, dq_acc, last_ds)
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        if not c.dq_warpgroup:
            # The first tile adds the dQ of a tile before it, which is zero.
            zeros = plgpu.layout_cast(jnp.zeros((64, QUERIES), self.dtype), tile_layout())
            smem.ds[1, mine, :] = zeros
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.ds_ready.at[1])
            plgpu.barrier_arrive(smem.ds_empty.at[0])
        self.wait_queries(smem, jnp.int32(0))
        s = pl.run_scoped(first_scores, plgpu.ACC((64, QUERIES), jnp.float32))
        first = (s,) if c.dq_warpgroup else (s, queries.lo, kv_head * g.group)
        count = per_head * g.group
        if c.dq_warpgroup and g.group > 1:  # one loop, for nested ones spill in this form
            *_, last = lax.fori_loop(0, count, any_tile, (queries.lo, jnp.int32(0), first))
        else:
            last = lax.fori_loop(0, g.group, one_head, first)
        # The tile loaded once too often.
        plgpu.barrier_arrive(smem.q_empty.at[lax.rem(count, c.num_stages)])
        if c.dq_warpgroup:
            for slot in range(NUM_DS):
                plgpu.barrier_wait(smem.ds_empty.at[slot])
        else:
            last_ds = lax.rem(count + 1, 2)
            plgpu.barrier_wait(smem.ds_ready.at[last_ds])
            dq = pl.run_scoped(last_dq, plgpu.ACC(self.dq_shape, jnp.float32))
            self.add_to_dq(gmem, smem, wg, dq, b, last[1], last[2], k_tile)
            plgpu.barrier_wait(smem.ds_empty.at[1 - last_ds])
        return (
            plgpu.wgmma_accumulator_load(dk_acc, wait_n=0),
            plgpu.wgmma_accumulator_load(dv_acc, wait_n=0),
        )

    def issue_scores(self, smem, keys: _Keys, s_acc, slot, only=0) -> None:
        """Starts the scores of a query tile, keys by queries."""
        plgpu.wgmma(s_acc, smem.k.at[only, keys.mine], smem.q.at[slot].transpose((1, 0)))

    def step(self, gmem, smem, keys: _Keys, it, i, head, carry):
        """The it-th visited query tile: dV, dK and dQ, and the scores of the next tile."""
        c = self.c
        s, *previous = carry
        only = 0 if c.dq_warpgroup else self.only(it)  # where registers are short
        slot, next_slot = lax.rem(it, c.num_stages), lax.rem(it + 1, c.num_stages)
        ds_slot = lax.rem(it, NUM_DS)
        n = keys.kv_head * self.g.group + head
        # Waits come before the accumulator exists: its zeros then cost no instruction.
        plgpu.barrier_wait(smem.do_full.at[slot])
        self.wait_tile(smem, self.odd_queries, c.num_stages + slot, lax.div(it, c.num_stages))
        slots = (slot, next_slot, ds_slot, only)
        key_gradients = functools.partial(self.issue_key_gradients, smem, keys, slots, s, i)

        def free_queries():
            plgpu.barrier_arrive(smem.q_empty.at[slot])
            plgpu.barrier_arrive(smem.do_empty.at[slot])

        s_shape = plgpu.ACC((64, QUERIES), jnp.float32)
        if c.dq_warpgroup:
            self.wait_queries(smem, it + 1)

            def whole_step(dp_acc, s_acc):
                key_gradients(dp_acc, s_acc)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                free_queries()
                return s

            return (pl.run_scoped(whole_step, s_shape, s_shape),)
        pl.run_scoped(functools.partial(key_gradients, s_acc=None), s_shape)
        (dq_i, dq_n), dq_slot = previous, 1 - ds_slot
        plgpu.barrier_wait(smem.ds_ready.at[dq_slot])
        self.wait_queries(smem, it + 1)

        def next_scores(dq_acc, s_acc):
            self.issue_scores(smem, keys, s_acc, next_slot, only)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            free_queries()
            plgpu.barrier_arrive(smem.ds_empty.at[dq_slot])
            self.add_to_dq(gmem, smem, keys.wg, dq, keys.b, dq_i, dq_n, keys.k_tile)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        def query_gradient(dq_acc):
            self.issue_dq(smem, keys.wg, dq_acc, dq_slot, only)
            return pl.run_scoped(functools.partial(next_scores, dq_acc), s_shape)

        s = pl.run_scoped(query_gradient, plgpu.ACC(self.dq_shape, jnp.float32))
        return s, i, n

    def issue_key_gradients(self, smem, keys: _Keys, slots, s, i, dp_acc, s_acc) -> None:
        """Issues the products of dV and dK of a query tile, which are under way at the end."""
        slot, next_slot, ds_slot, only = slots
        mine, wg = keys.mine, keys.wg
        ds_smem, q_smem, do_smem = smem.ds.at[ds_slot], smem.q.at[slot], smem.do.at[slot]
        plgpu.wgmma(dp_acc, smem.v.at[only, mine], do_smem.transpose((1, 0)))
        if s_acc is not None:
            self.issue_scores(smem, keys, s_acc, next_slot, only)
        p, slope = self.masked_probabilities(
            smem, wg, slot, s, i, keys.k_tile, keys.kv_ids, keys.queries
        )
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0 if s_acc is None else 1)
        if self.interpretable:
            smem.p[mine, :] = p.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(keys.dv_acc, smem.p.at[mine], do_smem)
        else:
            plgpu.wgmma(keys.dv_acc, p.astype(self.dtype), do_smem)
        delta = plgpu.load(smem.delta.at[slot], layout=column_layout())
        ds = p * (dp - lax.broadcast_in_dim(delta, p.shape, [1]))
        ds = (ds if slope is None else ds * slope).astype(self.dtype)
        plgpu.barrier_wait(smem.ds_empty.at[ds_slot])
        ds_smem[mine, :] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.ds_ready.at[ds_slot])
        in_registers = self.c.register_ds and not self.interpretable
        plgpu.wgmma(keys.dk_acc, ds if in_registers else ds_smem.at[mine], q_smem)

    def query_gradients(self, gmem, smem, b, kv_head, k_tile, queries: TileRange) -> None:
        """Computes dQ of each tile from the dS of both warpgroups, as a third warpgroup."""
        g = self.g
        per_head = queries.hi - queries.lo
        for slot in range(NUM_DS):
            plgpu.barrier_arrive(smem.ds_empty.at[slot])
        self.wait_keys(smem, 2 * self.c.num_stages)

        def step(it, place):
            i, head = place
            slot, buffer = lax.rem(it, NUM_DS), lax.rem(it, 2)
            plgpu.barrier_wait(smem.ds_ready.at[slot])

            def product(acc):
                plgpu.wgmma(acc, smem.ds.at[slot].transpose((1, 0)), smem.k.at[0])
                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            dq = pl.run_scoped(product, plgpu.ACC(self.dq_shape, jnp.float32))
            plgpu.barrier_arrive(smem.ds_empty.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            smem.dq[buffer] = dq
            plgpu.commit_smem()
            index = (b, pl.ds(i * QUERIES, QUERIES), kv_head * g.group + head)
            self.send_dq(smem.dq.at[buffer], gmem, k_tile, index)
            return queries.after(i, head)

        lax.fori_loop(0, per_head * g.group, step, (queries.lo, jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    def masked_probabilities(self, smem, wg: int, slot, s, i, k_tile, kv_ids, queries):
        """Computes P transposed from scores, and the soft cap's derivative, None without one."""
        lse = plgpu.load(smem.lse.at[slot], layout=column_layout())
        p, slope = self.probabilities(s, lse, lse_dim=1)
        if not self.masked:
            return p, slope
        mask = functools.partial(self.mask, smem, wg, slot, i, k_tile, kv_ids)
        # A branch rather than a loop of its own: a second copy of the loop is more than the
        # assembler keeps in registers.
        return lax.cond(queries.is_whole(i), lambda p: p, mask, p), slope

    def mask(self, smem, wg: int, slot, i, k_tile, kv_ids, p):
        """Puts 0 where the query of a column does not see the key of a row."""
        if self.segmented:
            q_ids = plgpu.load(smem.q_ids.at[slot], layout=column_layout())
            p = self.mask_ids(p, q_ids, kv_ids, fill=0.0, by_keys=True)
        key0 = k_tile * KEYS + 64 * wg
        aligned = key0 - self.g.diagonal - i * QUERIES
        return self.mask_positions(p, aligned, key0, fill=0.0, by_keys=True)

    def issue_dq(self, smem, wg: int, dq_acc, slot, only=0) -> None:
        """Starts this warpgroup's part of dQ, from the dS of both."""
        columns = pl.ds(wg * self.dq_shape[1], self.dq_shape[1])
        plgpu.wgmma(dq_acc, smem.ds.at[slot].transpose((1, 0)), smem.k.at[only, :, columns])

    def add_to_dq(self, gmem, smem, wg: int, dq, b, i, n, k_tile) -> None:
        """Adds this warpgroup's part of a tile's dQ to the float32 sum in global memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.dq[wg] = dq
        plgpu.commit_smem()
        width = self.dq_shape[1]
        index = (b, pl.ds(i * QUERIES, QUERIES), n, pl.ds(wg * width, width))
        self.send_dq(smem.dq.at[wg], gmem, k_tile, index)
