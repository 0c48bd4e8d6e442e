"""What the forward kernels for Hopper share: roles of warpgroups, order of blocks, the ring of
tiles, the loop over them.

Dims: as in ``forward_kernel``.

A block owns ``64 * num_warpgroups`` queries of one head and walks the key tiles they see from the
last to the first, so that the masked diagonal comes before the long unmasked loop. Per tile a
compute warpgroup issues two matmuls back to back, the scores of this tile and the value product of
the tile before, and works on the softmax of the first while the second runs. Warpgroups take turns
at the tensor cores. Scores are in units of log2: an exponential is a multiply-add and an ex2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E, column_layout, row_layout, soft_cap, tile_layout

from .config import ForwardConfig, Fp8Config
from .kernel import AttentionKernel
from .tiles import TileRange, heads_per_wave, key_tiles
from .value_sum import StagedValueSum, ValueSum

# Finite, so that exp2(old maximum - new maximum) of a row that has seen no key is 1 and not NaN.
NO_MAXIMUM = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBlock(AttentionKernel):
    """A block: 64 queries a compute warpgroup, over the key tiles that they see."""

    OPERAND_BYTES: ClassVar[int]  # of an element of keys and values
    TRANSPOSED_VALUES: ClassVar[bool]

    c: ForwardConfig | Fp8Config

    # What kernels differ in.

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        raise NotImplementedError

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        raise NotImplementedError

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copy of the values of a tile, which arrives at ``v_full``."""
        raise NotImplementedError

    def queries(self, smem, wg):
        """A warpgroup's queries."""
        raise NotImplementedError

    def load_rows(self, smem, wg) -> Any:
        """What ``mask`` and ``softmax`` need of a warpgroup's queries: ids, if they have some."""
        raise NotImplementedError

    def softmax(self, smem, i, s, peak, total, of_rows):
        """Probabilities relative to the running maximum, and what the maximum's growth costs."""
        raise NotImplementedError

    def as_operand(self, p):
        """Probabilities as the left operand of the value product."""
        raise NotImplementedError

    def value_sum(self, smem, acc) -> ValueSum:
        """The running sum in an accumulator."""
        raise NotImplementedError

    def out_buffer(self, smem, wg):
        """Where a warpgroup's output leaves from."""
        raise NotImplementedError

    def normalized(self, gmem, b, n, row0, peak, total):
        """The factor of the output's rows, and their maxima and sums, a sink's with them."""
        raise NotImplementedError

    # What kernels of other arrays than whole ones have otherwise.

    @property
    def pieces(self) -> int:
        """Copies that bring a tile of keys, or of values."""
        return 1

    def aligned(self, gmem, b, row0):
        """The key at the position of query ``row0``."""
        del gmem, b
        return row0 + self.g.diagonal

    def wait_queries(self, smem, wg) -> None:
        """Until a warpgroup's queries are there."""
        plgpu.barrier_wait(smem.q_full.at[wg])

    def wait_keys(self, smem, i) -> None:
        """Until the i-th visited tile's keys are there."""
        plgpu.barrier_wait(smem.k_full.at[lax.rem(i, self.c.num_stages)])

    def cleaner(self, smem, slot, keys: TileRange, i, *, masked: bool) -> Callable[[], None] | None:
        """What to do with the i-th visited tile's values before they are multiplied.

        Args:
            masked: whether scores of the tile visited next are masked, or there is none.
        """
        del smem, slot, keys, i, masked
        return None

    # What they share.

    def rows_and_barriers(self, *, copies: int) -> dict[str, Any]:
        """Buffers of each row and barriers.

        Args:
            copies: that bring a warpgroup's queries: they, and what else belongs to them. As much
                comes with a tile of keys, which arrives in ``pieces``.
        """
        c = self.c
        ring = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        return {
            "lse": plgpu.SMEM((c.num_warpgroups, 64), jnp.float32),
            "pin": plgpu.SMEM((c.num_warpgroups, 64, 8), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=copies, num_barriers=c.num_warpgroups),
            "q_empty": plgpu.Barrier(num_barriers=c.num_warpgroups),
            "k_full": ring(num_arrivals=self.pieces + copies - 1),
            "v_full": ring(num_arrivals=self.pieces),
            "k_empty": ring(num_arrivals=c.num_warpgroups),
            "v_empty": ring(num_arrivals=c.num_warpgroups),
            "turn": plgpu.Barrier(num_barriers=c.num_warpgroups),
        }

    def log2_total(self, peak, total):
        """The logsumexp in units of log2."""
        return peak + jnp.log2(total)

    def attend_all(
        self, operands: dict[str, jax.Array], *, num_queries: int
    ) -> tuple[jax.Array, jax.Array]:
        """out [B, T, N, Hv] and logsumexp float32 [B, T, N]; num_queries: of the operands."""
        g = self.g
        results = {
            "out": jax.ShapeDtypeStruct((g.B, num_queries, g.N, g.Hv), self.dtype),
            "lse": jax.ShapeDtypeStruct((g.B, g.N, self.num_q_tiles * self.q_tile), jnp.float32),
        }
        found = self.launch(
            operands,
            results,
            num_tiles=min(NUM_PROCESSORS, self.num_tiles) if self.c.persistent else self.num_tiles,
            num_threads=self.c.num_warpgroups + 1,
        )
        return found["out"][:, : g.T], found["lse"][:, :, : g.T].swapaxes(1, 2)

    def run(self, gmem, smem) -> None:
        """One block: a role for each warpgroup, and for its tiles one after another."""
        c, wg = self.c, lax.axis_index("wg")

        def every_tile(work: Callable[..., None]) -> None:
            """``work(b, n, q0, keys)`` of this block's tiles."""
            block = lax.axis_index("tile")
            if not c.persistent:
                work(*self.place(gmem, block))
                return
            workers = min(NUM_PROCESSORS, self.num_tiles)
            count = lax.div(self.num_tiles - block + (workers - 1), workers)

            def step(i, _):
                work(*self.place(gmem, block + i * workers))

            lax.fori_loop(0, count, step, None)

        @pl.when(wg < c.num_warpgroups)
        def _():
            plgpu.set_max_registers(240 if c.num_warpgroups == 2 else 160, action="increase")
            for slot in range(c.num_stages):
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                plgpu.barrier_arrive(smem.v_empty.at[slot])
            plgpu.barrier_arrive(smem.q_empty.at[wg])
            if c.ping_pong:  # the first turn, and at the end whose it would be
                pl.when(wg == c.num_warpgroups - 1)(lambda: plgpu.barrier_arrive(smem.turn.at[0]))
            every_tile(functools.partial(self.compute, gmem, smem))
            if c.ping_pong:
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.turn.at[0]))

        @pl.when(wg == c.num_warpgroups)
        def _():
            # 2 * 240 + 24 and 3 * 160 + 32 registers a thread is what a multiprocessor has: asking
            # for more does not fail, it waits for ever.
            plgpu.set_max_registers(24 if c.num_warpgroups == 2 else 32, action="decrease")
            self.make_arrivals(smem)
            every_tile(functools.partial(self.load, gmem, smem))
            if not self.interpretable and not c.persistent:  # the interpreter knows no prefetch
                self.prefetch(gmem, lax.axis_index("tile") + NUM_PROCESSORS)
            for slot in range(c.num_stages):
                plgpu.barrier_wait(smem.k_empty.at[slot])
                plgpu.barrier_wait(smem.v_empty.at[slot])
            for w in range(c.num_warpgroups):
                plgpu.barrier_wait(smem.q_empty.at[w])

    def place(self, gmem, block) -> tuple[jax.Array, jax.Array, jax.Array, TileRange]:
        """Batch entry, head and first query of a tile, and the key tiles that it visits."""
        g, c = self.g, self.c
        head, q_tile = self.tile_of(block)
        b, n = lax.div(head, g.N), lax.rem(head, g.N)
        q0 = q_tile * c.block_q
        keys = key_tiles(self.spec, g, q0, c.block_q, c.block_kv)
        if self.segmented:
            keys = keys.meet(gmem.ranges, b, q_tile)
        return b, n, q0, keys.ordered(at_least_one=True)

    def tile_of(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Head, of all batch entries', and query tile of a block.

        Longest first (the last queries, under a causal mask), inside a wave of heads.
        """
        g = self.g
        wave = heads_per_wave(g.B * g.N, g.group, self.OPERAND_BYTES * g.S * (g.H + g.Hv))
        in_wave = lax.rem(block, wave * self.num_q_tiles)
        head = lax.div(block, wave * self.num_q_tiles) * wave + lax.rem(in_wave, wave)
        return head, self.num_q_tiles - 1 - lax.div(in_wave, wave)

    def load(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """Keys and values into the ring, as compute warpgroups empty it, and the queries after the
        first keys, for which they must be done with those before.
        """
        c = self.c
        kv_head = lax.div(n, self.g.group)

        def copy(i, *, first=False):
            slot, tile = lax.rem(i, c.num_stages), keys.hi - 1 - i
            plgpu.barrier_wait(smem.k_empty.at[slot])
            self.copy_keys(gmem, smem, b, kv_head, tile, i)
            if first:
                for w in range(c.num_warpgroups):
                    plgpu.barrier_wait(smem.q_empty.at[w])
                    self.copy_queries(gmem, smem, b, n, q0 + 64 * w, w)
            plgpu.barrier_wait(smem.v_empty.at[slot])
            self.copy_values(gmem, smem, b, kv_head, tile, i)

        copy(jnp.int32(0), first=True)
        lax.fori_loop(1, keys.hi - keys.lo, lambda i, _: copy(i), None)

    def prefetch(self, gmem, block: jax.Array) -> None:
        """Into L2, what a later block reads first; by its positions, for ids would be waited for.

        The blocks of this kernel end at about the same time, so that this multiprocessor will run
        that block or one beside it: its wait for memory is then the short one for L2. With another
        number of multiprocessors it comes early or late.
        """
        g, c = self.g, self.c
        count = self.num_tiles
        there = block < count
        head, q_tile = self.tile_of(jnp.minimum(block, count - 1))
        b, n, q0 = lax.div(head, g.N), lax.rem(head, g.N), q_tile * c.block_q
        keys = key_tiles(self.spec, g, q0, c.block_q, c.block_kv).ordered(at_least_one=True)
        first = pl.ds((keys.hi - 1) * c.block_kv, c.block_kv)
        for w in range(c.num_warpgroups):
            plgpu.async_prefetch(gmem.q.at[b, pl.ds(q0 + 64 * w, 64), n], predicate=there)
        plgpu.async_prefetch(gmem.k.at[b, first, lax.div(n, g.group)], predicate=there)

    def compute(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """64 queries of a warpgroup: attention over all key tiles, then out and logsumexp."""
        c, wg = self.c, lax.axis_index("wg")
        row0 = q0 + 64 * wg
        key0 = self.aligned(gmem, b, row0)

        def attend():
            if self.interpretable:
                staged = StagedValueSum(smem, self.g.Hv, transposed=self.TRANSPOSED_VALUES)
                return self.attend(smem, key0, keys, staged)
            return pl.run_scoped(
                lambda acc: self.attend(smem, key0, keys, self.value_sum(smem, acc)),
                plgpu.ACC((64, self.g.Hv), jnp.float32),
            )

        self.wait_queries(smem, wg)
        o, peak, total = attend()
        factor, peak, total = self.normalized(gmem, b, n, row0, peak, total.sum(axis=1))
        out_smem = self.out_buffer(smem, wg)
        # A row that sees nothing is 0, also where what is hidden from it is no number.
        factor = lax.broadcast_in_dim(factor, o.shape, [0])
        out_smem[...] = jnp.where(factor == 0.0, 0.0, o * factor).astype(self.dtype)
        lse = self.log2_total(peak, total) * (1 / LOG2E)
        smem.lse[wg] = jnp.where(total == 0.0, -jnp.inf, lse)
        plgpu.commit_smem()
        self.store_tile(out_smem, gmem.out, (b, row0, n))
        plgpu.copy_smem_to_gmem(smem.lse.at[wg], gmem.lse.at[b, n, pl.ds(row0, 64)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=c.persistent)
        plgpu.barrier_arrive(smem.q_empty.at[wg])

    def attend(self, smem, aligned, keys: TileRange, product: ValueSum | StagedValueSum):
        """The loop over key tiles: unnormalized output, row maxima and row sums (of 8 columns).

        Args:
            aligned: the key at the first query's position.
        """
        c = self.c
        wg = lax.axis_index("wg")
        peak = plgpu.layout_cast(jnp.full((64,), NO_MAXIMUM, jnp.float32), row_layout())
        total = plgpu.layout_cast(jnp.full((64, 8), 0.0, jnp.float32), tile_layout())
        of_rows = self.load_rows(smem, wg)

        def scores(i, between, masked: bool, peak, total, *, first: bool = False):
            """Issues QK and what ``between`` issues, which must be waited for; the softmax."""
            slot = lax.rem(i, c.num_stages)
            # Waits come before the accumulator exists: its zeros then cost no instruction.
            self.wait_keys(smem, i)
            if c.ping_pong:
                plgpu.barrier_wait(smem.turn.at[wg])

            def body(s_acc, *more):
                plgpu.wgmma(s_acc, self.queries(smem, wg), smem.k.at[slot].transpose((1, 0)))
                between(*more)
                if c.ping_pong:
                    plgpu.barrier_arrive(smem.turn.at[lax.rem(wg + 1, c.num_warpgroups)])
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if first else 1)
                if self.spec.logit_soft_cap is not None:
                    s = soft_cap(s, self.spec.scale, self.spec.logit_soft_cap)
                if masked:
                    s = self.mask(smem, slot, s, aligned, (keys.hi - 1 - i) * c.block_kv, of_rows)
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                p, *rest = self.softmax(smem, i, s, peak, total, of_rows)
                if not first and c.overlap:
                    # A store is what keeps the softmax ahead of the wait for PV: the assembler
                    # moves plain arithmetic behind it, and then nothing runs under PV.
                    smem.pin[wg] = rest[1]
                p, *rest = lax.optimization_barrier((p, *rest))
                part = () if first else product.collect(*more)
                return p, *rest, part

            more = () if first else product.accumulators
            return pl.run_scoped(body, plgpu.ACC((64, c.block_kv), jnp.float32), *more)

        def step(i, carry, masked: bool):
            p, peak, total, o = carry
            slot = lax.rem(i - 1, c.num_stages)
            product.prepare(slot)
            clean = self.cleaner(smem, slot, keys, i - 1, masked=masked)
            issue = functools.partial(product.issue, p, slot, clean)
            p, peak, total, alpha, part = scores(i, issue, masked, peak, total)
            o = product.rescale(o, part, slot, alpha)
            return self.as_operand(p), peak, total, o

        p, peak, total, *_ = scores(
            jnp.int32(0), lambda: None, self.masked, peak, total, first=True
        )
        carry = (self.as_operand(p), peak, total, product.start())
        p, peak, total, o = self.walk(keys, step, carry, product.loop)
        slot = lax.rem(keys.hi - keys.lo - 1, c.num_stages)
        product.prepare(slot)
        clean = self.cleaner(smem, slot, keys, keys.hi - keys.lo - 1, masked=True)
        return product.last(o, p, slot, clean), peak, total

    def mask(self, smem, slot, s, aligned, key0, q_ids):
        """-inf where the query of a row does not see the key of a column."""
        if self.segmented:
            kv_ids = plgpu.load(smem.kv_ids.at[slot], layout=column_layout())
            s = self.mask_ids(s, q_ids, kv_ids, fill=-jnp.inf)
        return self.mask_positions(s, aligned - key0, key0, fill=-jnp.inf)

    def walk(self, keys: TileRange, step: Callable[..., Any], carry, loop: Callable[..., Any]):
        """``step(i, carry, masked=...)`` for all visited tiles but the first, from the last key."""
        first, count = jnp.int32(1), keys.hi - keys.lo
        masked_step = functools.partial(step, masked=True)
        full_step = functools.partial(step, masked=False)
        if not self.masked:
            return loop(first, count, full_step, carry)
        after_right = jnp.maximum(keys.hi - keys.full_hi, 1)
        after_full = jnp.maximum(keys.hi - keys.full_lo, 1)
        carry = loop(first, after_right, masked_step, carry)
        carry = loop(after_right, after_full, full_step, carry)
        if self.segmented or self.spec.left is not None:
            carry = loop(after_full, count, masked_step, carry)
        return carry
