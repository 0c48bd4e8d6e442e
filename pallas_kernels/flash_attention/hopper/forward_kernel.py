"""Flash attention forward for Hopper: one warpgroup loads, two or three compute.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.

A block owns ``64 * num_warpgroups`` queries of one head. It visits the key tiles they see from the
last to the first, so that the masked diagonal comes before the long unmasked loop. Per tile a
compute warpgroup issues two matmuls back to back: the scores of this tile and the value product of
the previous one. While the second runs, it computes the softmax of the scores. Warpgroups take the
tensor cores alternately (ping-pong). Scores are in units of log2: an exponential is a multiply-add
and ex2.

- ptxas would move the softmax's arithmetic behind ``wgmma.wait_group``. A store to shared memory of
  a value that depends on the whole softmax keeps it before the wait, while P V runs (``pin``).
- Zeroing an accumulator is free only if its first matmul follows in the same basic block. So
  barrier waits come before the accumulator is created.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.odd_tiles import GROUP
from pallas_kernels.hopper.tile import (
    LOG2E,
    column_layout,
    row_layout,
    scale_rows_if_needed,
    soft_cap,
    sum_strips,
    swizzle_bytes,
    tile_layout,
    tiled,
)

from .config import (
    FORWARD_WIDTH,
    ForwardConfig,
    exceeds_shared_memory,
    forward_config,
    refuse,
    short_endings,
    unsupported,
)
from .kernel import AttentionKernel
from .tiles import TileRange, geometry_of, heads_per_wave, key_tiles, pad_rows, pad_width, token_ids

# Finite, so that exp2(old maximum - new maximum) of a row that has seen no key is 1 and not NaN.
NO_MAXIMUM = -1e30
# A row's reference maximum may lag by 2**8: its probabilities stay far from overflow in fp16.
RESCALE_ABOVE = 8.0


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
    config: ForwardConfig | None = None,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention of q [B, T, N, H] over k [B, S, K, H] and v [B, S, K, Hv].

    Args:
        q, k, v: fp16 or bf16.
        masks: the mask arrays; a bias is not supported.
        spec: the static part of the call.
        config: tiles; None takes those of the tuning table.
        interpretable: avoids what the interpreter lacks: accumulators that outlive a tile, matmul
            operands in registers and inline code.

    Returns:
        out [B, T, N, Hv] in q's dtype and logsumexp float32 [B, T, N].

    Raises:
        UnsupportedError: ``unsupported`` has a reason, or the tiles exceed shared memory.
    """
    refuse(unsupported(spec, masks, q, k, v))
    Hv = v.shape[3]
    q, k, v = (pad_width(x, FORWARD_WIDTH) for x in (q, k, v))
    config = config or forward_config(
        q.shape[3], v.shape[3], short_endings(spec, masks, q.shape[1], k.shape[1])
    )
    refuse(exceeds_shared_memory(config, q.shape[3], v.shape[3]))
    odd = [length for length in (q.shape[1], k.shape[1]) if length % GROUP]
    if config.persistent and odd and not interpretable:
        refuse(f"persistent=True needs lengths that {GROUP} divides, not {odd[0]}; leave it False")
    g = geometry_of(q, v)
    if interpretable:
        q, k, v = (pad_rows(x) for x in (q, k, v))
    ids = token_ids(masks, g, q_tile=config.block_q, kv_tile=config.block_kv)
    operands = {"q": q, "k": k, "v": v, **ids}
    if masks.sinks is not None:
        operands["sinks"] = masks.sinks.astype(jnp.float32) * LOG2E
    kernel = ForwardKernel(
        g=g, spec=spec, c=config, dtype=q.dtype, q_tile=config.block_q, kv_tile=config.block_kv,
        segmented=bool(ids), sinks=masks.sinks is not None, interpretable=interpretable,
        padded=interpretable,
    )  # fmt: skip
    out, lse = kernel.attend_all(operands, num_queries=q.shape[1])
    return out[..., :Hv], lse


class ValueSum:
    """Running sum P V of a query tile, kept in a WGMMA accumulator over all key tiles.

    ``issue`` starts the product with one value tile. ``rescale`` waits for it, frees the tile's
    slot, and rescales the sum if the row maximum grew. ``last`` adds the last product and returns
    the sum. The loop carries the value that ``start`` returns.
    """

    accumulators = ()

    def __init__(self, smem, acc):
        self.smem, self.acc = smem, acc

    def start(self):
        """Returns the loop's initial carry, before the first product of P and V."""
        return ()

    def prepare(self, slot):
        """Prepares a product P V, before the scores that run at the same time are issued."""

    def issue(self, p, slot, clean=None):
        """Starts ``p @ v`` with a ring slot's values, once ``clean`` has zeroed hidden ones."""
        plgpu.barrier_wait(self.smem.v_full.at[slot])
        if clean is not None:
            clean()
        plgpu.wgmma(self.acc, p, self.smem.v.at[slot])

    def collect(self):
        """Returns the carry for ``rescale``: empty here, as the accumulator holds the product."""
        return ()

    def rescale(self, carried, part, slot, alpha):
        """Waits for the product, frees its ring slot, and multiplies the sum's rows by alpha."""
        del part
        o, alpha = lax.optimization_barrier((self.finish(slot), alpha))
        self.acc[...] = scale_rows_if_needed(o, alpha)
        return carried

    def last(self, carried, p, slot, clean=None):
        """Adds the last product P V and returns the whole sum."""
        del carried
        self.issue(p, slot, clean)
        return self.finish(slot)

    def finish(self, slot):
        """Waits for the product P V, frees its ring slot, and returns the accumulator."""
        o = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o


class StagedValueSum:
    """Running sum P V for the interpreter: the sum is in registers, P in shared memory."""

    def __init__(self, smem, value_dim: int):
        self.smem, self.value_dim = smem, value_dim
        self.accumulators = (plgpu.ACC((64, value_dim), jnp.float32),)

    def start(self):
        """Returns the empty sum P V as the loop's initial carry."""
        return _zeros((64, self.value_dim))

    def prepare(self, slot):
        """Waits until the slot's values are in shared memory."""
        plgpu.barrier_wait(self.smem.v_full.at[slot])

    def issue(self, p, slot, clean, acc):
        """Starts ``p @ v`` with a ring slot's values, once ``clean`` has zeroed hidden ones."""
        if clean is not None:
            clean()
        p_smem = self.smem.p.at[lax.axis_index("wg")]
        p_smem[...] = p
        plgpu.commit_smem()
        plgpu.wgmma(acc, p_smem, self.smem.v.at[slot])

    def collect(self, acc):
        """Waits for the product P V and returns it."""
        return plgpu.wgmma_accumulator_load(acc, wait_n=0)

    def rescale(self, o, part, slot, alpha):
        """Adds the product, frees its ring slot, and multiplies the sum's rows by alpha."""
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return (o + part) * lax.broadcast_in_dim(alpha, o.shape, [0])

    def last(self, o, p, slot, clean=None):
        """Adds the last product P V and returns the whole sum."""

        def product(acc):
            self.issue(p, slot, clean, acc)
            return self.collect(acc)

        part = pl.run_scoped(product, *self.accumulators)
        plgpu.barrier_arrive(self.smem.v_empty.at[slot])
        return o + part


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardKernel(AttentionKernel):
    """Forward kernel of one call; a compute warpgroup loops over the key tiles of 64 queries."""

    name: ClassVar[str] = "attention_forward"

    c: ForwardConfig
    sinks: bool

    @property
    def tiling(self) -> Any:
        """Tiling and swizzle of an operand's tile in shared memory."""
        return tiled(swizzle_bytes(self.g.H, self.g.Hv, self.c.block_kv))

    def scratch(self) -> dict:
        """Returns a block's shared memory buffers and barriers, by name."""
        g, c, tile = self.g, self.c, self.tiling
        buffers = {
            # The output takes the queries' space at the end, each warpgroup its own: rows are added
            # to the narrower of the two so that warpgroups are equally far apart in both.
            "q_out": plgpu.RefUnion(
                *(
                    plgpu.SMEM(
                        (c.num_warpgroups, 64 * max(g.H, g.Hv) // width, width),
                        self.dtype,
                        transforms=tile,
                    )
                    for width in (g.H, g.Hv)
                )
            ),
            "k": plgpu.SMEM((c.num_stages, c.block_kv, g.H), self.dtype, transforms=tile),
            "v": plgpu.SMEM((c.num_stages, c.block_kv, g.Hv), self.dtype, transforms=tile),
        } | self.rows_and_barriers(copies=2 if self.segmented else 1)
        buffers |= self.arrivals(2 * c.num_stages + c.num_warpgroups)
        if self.segmented:
            buffers["q_ids"] = plgpu.SMEM((c.num_warpgroups, 64), jnp.int32)
            buffers["kv_ids"] = plgpu.SMEM((c.num_stages, c.block_kv), jnp.int32)
        if self.interpretable:
            shape = (c.num_warpgroups, 64, c.block_kv)
            buffers["p"] = plgpu.SMEM(shape, self.dtype, transforms=tile)
        return buffers

    @property
    def pieces(self) -> int:
        """Number of TMA copies that bring one tile of keys, or one of values."""
        return 1

    def aligned(self, gmem, b, row0):
        """Returns the position of the key with which query ``row0`` is aligned (the diagonal)."""
        del gmem, b
        return row0 + self.g.diagonal

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        q_smem, full = smem.q_out[0].at[w, pl.ds(0, 64)], smem.q_full.at[w]
        which = 2 * self.c.num_stages + w  # after keys and values
        self.load_tile(smem, self.odd_queries, gmem.q, (b, row0, n), q_smem, full, which)
        if self.segmented:
            plgpu.copy_gmem_to_smem(gmem.q_ids.at[b, pl.ds(row0, 64)], smem.q_ids.at[w], full)

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        slot, row0 = lax.rem(i, self.c.num_stages), tile * self.c.block_kv
        full = smem.k_full.at[slot]
        self.load_tile(smem, self.odd_keys, gmem.k, (b, row0, kv_head), smem.k.at[slot], full, slot)
        if self.segmented:
            rows = pl.ds(row0, self.c.block_kv)
            plgpu.copy_gmem_to_smem(gmem.kv_ids.at[b, rows], smem.kv_ids.at[slot], full)

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copy of the values of a tile, which arrives at ``v_full``."""
        stages = self.c.num_stages
        slot, place = lax.rem(i, stages), (b, tile * self.c.block_kv, kv_head)
        full, which = smem.v_full.at[slot], stages + slot
        self.load_tile(smem, self.odd_keys, gmem.v, place, smem.v.at[slot], full, which)

    def wait_queries(self, smem, wg) -> None:
        """Waits until the queries of compute warpgroup ``wg`` are in shared memory."""
        plgpu.barrier_wait(smem.q_full.at[wg])
        self.wait_tile(smem, self.odd_queries, 2 * self.c.num_stages + wg, 0)

    def wait_keys(self, smem, i) -> None:
        """Waits until the keys of the i-th visited tile are in shared memory."""
        stages = self.c.num_stages
        plgpu.barrier_wait(smem.k_full.at[lax.rem(i, stages)])
        self.wait_tile(smem, self.odd_keys, lax.rem(i, stages), lax.div(i, stages))

    def cleaner(self, smem, slot, keys: TileRange, i, *, masked: bool) -> Callable[[], None] | None:
        """Returns a function to call before the i-th tile's values are multiplied, or None.

        Args:
            masked: whether scores of the next visited tile are masked, or no tile is next.
        """
        del keys, masked
        stages = self.c.num_stages

        def wait() -> None:
            self.wait_tile(smem, self.odd_keys, stages + slot, lax.div(i, stages))

        return wait if self.odd_keys else None

    def softmax(self, s, peak, total):
        """Computes probabilities by the running row maximum, and the factors of older sums."""
        capped = self.spec.logit_soft_cap is not None
        unit = LOG2E if capped else self.spec.scale * LOG2E
        top = jnp.maximum(peak, s.max(axis=1) * unit)
        top = jnp.where(top - peak > RESCALE_ABOVE, top, peak)
        alpha = jnp.exp2(peak - top)
        p = jnp.exp2(s * unit - lax.broadcast_in_dim(top, s.shape, [0]))
        total = total * lax.broadcast_in_dim(alpha, total.shape, [0]) + sum_strips(p)
        return p, top, total, alpha

    def normalized(self, gmem, b, n, row0, peak, total):
        """Returns each row's normalizing factor, and row maxima and sums including the sink."""
        del b, row0
        factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
        if not self.sinks:
            return factor, peak, total
        sink = gmem.sinks[n]
        top = jnp.maximum(peak, sink)
        total = total * jnp.exp2(peak - top) + jnp.exp2(sink - top)
        shrink = jnp.exp2(peak - top)
        return jnp.where(total == 0.0, 0.0, shrink / total), top, total

    def rows_and_barriers(self, *, copies: int) -> dict[str, Any]:
        """Returns buffers with one number per row, and barriers, by name.

        Args:
            copies: number of copies that fill a warpgroup's queries, and their ids if the call has
                ids. A key tile takes as many, except that its keys come in ``pieces`` copies.
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

    def attend_all(
        self, operands: dict[str, jax.Array], *, num_queries: int
    ) -> tuple[jax.Array, jax.Array]:
        """Launches the kernel: out [B, T, N, Hv] and logsumexp float32 [B, T, N]."""
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
        """Runs one block: a role for each warpgroup, and its tiles one after another."""
        c, wg = self.c, lax.axis_index("wg")

        def every_tile(work: Callable[..., None]) -> None:
            """Calls ``work(b, n, q0, keys)`` for each of this block's tiles."""
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
            # The first turn, and at the end whose it would be.
            pl.when(wg == c.num_warpgroups - 1)(lambda: plgpu.barrier_arrive(smem.turn.at[0]))
            every_tile(functools.partial(self.compute, gmem, smem))
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.turn.at[0]))

        @pl.when(wg == c.num_warpgroups)
        def _():
            # 2 * 240 + 24 and 3 * 160 + 32 registers a thread is what an SM has: asking
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
        """Returns a tile's batch entry, head, first query, and the key tiles that it visits."""
        g, c = self.g, self.c
        head, q_tile = self.tile_of(block)
        b, n = lax.div(head, g.N), lax.rem(head, g.N)
        q0 = q_tile * c.block_q
        keys = key_tiles(self.spec, g, q0, c.block_q, c.block_kv)
        if self.segmented:
            keys = keys.meet(gmem.ranges, b, q_tile)
        return b, n, q0, keys.ordered(at_least_one=True)

    def tile_of(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the head (counted over the batch) and query tile that a block computes.

        Heads run in waves. In a wave, the longest tiles come first (the last queries, if causal).
        """
        g = self.g
        wave = heads_per_wave(g.B * g.N, g.group, 2 * g.S * (g.H + g.Hv))
        in_wave = lax.rem(block, wave * self.num_q_tiles)
        head = lax.div(block, wave * self.num_q_tiles) * wave + lax.rem(in_wave, wave)
        return head, self.num_q_tiles - 1 - lax.div(in_wave, wave)

    def load(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """Loads keys and values into the ring, and the queries after the first keys.

        Queries are loaded once the compute warpgroups are done with the previous tile's queries.
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
        """Prefetches into L2 the first keys and queries that a later block reads.

        The first keys are found by position alone, as reading ids would take too long. Blocks end
        at about the same time, so this SM or a neighbor soon runs that block and reads from L2. On
        a GPU with another number of SMs the prefetch comes too early or too late.
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
        """Computes 64 queries of a warpgroup over all key tiles, and writes out and logsumexp."""
        c, wg = self.c, lax.axis_index("wg")
        row0 = q0 + 64 * wg
        key0 = self.aligned(gmem, b, row0)

        def attend():
            if self.interpretable:
                return self.attend(smem, key0, keys, StagedValueSum(smem, self.g.Hv))
            return pl.run_scoped(
                lambda acc: self.attend(smem, key0, keys, ValueSum(smem, acc)),
                plgpu.ACC((64, self.g.Hv), jnp.float32),
            )

        self.wait_queries(smem, wg)
        o, peak, total = attend()
        factor, peak, total = self.normalized(gmem, b, n, row0, peak, total.sum(axis=1))
        out_smem = smem.q_out[1].at[wg, pl.ds(0, 64)]
        # A row that sees nothing is 0, also where what is hidden from it is no number.
        factor = lax.broadcast_in_dim(factor, o.shape, [0])
        out_smem[...] = jnp.where(factor == 0.0, 0.0, o * factor).astype(self.dtype)
        lse = (peak + jnp.log2(total)) * (1 / LOG2E)
        smem.lse[wg] = jnp.where(total == 0.0, -jnp.inf, lse)
        plgpu.commit_smem()
        self.store_tile(out_smem, gmem.out, (b, row0, n))
        plgpu.copy_smem_to_gmem(smem.lse.at[wg], gmem.lse.at[b, n, pl.ds(row0, 64)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=c.persistent)
        plgpu.barrier_arrive(smem.q_empty.at[wg])

    def attend(self, smem, aligned, keys: TileRange, product: ValueSum | StagedValueSum):
        """Loops over key tiles; returns unnormalized output, row maxima, row sums of 8 columns.

        Args:
            aligned: position of the key that the first query is aligned with.
        """
        c, wg = self.c, lax.axis_index("wg")
        peak = plgpu.layout_cast(jnp.full((64,), NO_MAXIMUM, jnp.float32), row_layout())
        total = plgpu.layout_cast(jnp.full((64, 8), 0.0, jnp.float32), tile_layout())
        q_ids = plgpu.load(smem.q_ids.at[wg], layout=row_layout()) if self.segmented else None

        def scores(i, between, masked: bool, peak, total, *, first: bool = False):
            """Issues QK and the product that ``between`` issues, and computes the softmax."""
            slot = lax.rem(i, c.num_stages)
            # Waits come before the accumulator exists: its zeros then cost no instruction.
            self.wait_keys(smem, i)
            plgpu.barrier_wait(smem.turn.at[wg])

            def body(s_acc, *more):
                q_smem = smem.q_out[0].at[wg, pl.ds(0, 64)]
                plgpu.wgmma(s_acc, q_smem, smem.k.at[slot].transpose((1, 0)))
                between(*more)
                plgpu.barrier_arrive(smem.turn.at[lax.rem(wg + 1, c.num_warpgroups)])
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0 if first else 1)
                if self.spec.logit_soft_cap is not None:
                    s = soft_cap(s, self.spec.scale, self.spec.logit_soft_cap)
                if masked:
                    s = self.mask(smem, slot, s, aligned, (keys.hi - 1 - i) * c.block_kv, q_ids)
                plgpu.barrier_arrive(smem.k_empty.at[slot])
                p, *rest = self.softmax(s, peak, total)
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
            return p.astype(self.dtype), peak, total, o

        p, peak, total, *_ = scores(
            jnp.int32(0), lambda: None, self.masked, peak, total, first=True
        )
        carry = (p.astype(self.dtype), peak, total, product.start())
        p, peak, total, o = self.walk(keys, step, carry)
        slot = lax.rem(keys.hi - keys.lo - 1, c.num_stages)
        product.prepare(slot)
        clean = self.cleaner(smem, slot, keys, keys.hi - keys.lo - 1, masked=True)
        return product.last(o, p, slot, clean), peak, total

    def mask(self, smem, slot, s, aligned, key0, q_ids):
        """Sets scores to -inf where the row's query does not see the column's key."""
        if self.segmented:
            kv_ids = plgpu.load(smem.kv_ids.at[slot], layout=column_layout())
            s = self.mask_ids(s, q_ids, kv_ids, fill=-jnp.inf)
        return self.mask_positions(s, aligned - key0, key0, fill=-jnp.inf)

    def walk(self, keys: TileRange, step: Callable[..., Any], carry):
        """Calls ``step(i, carry, masked=...)`` for tiles 1, 2, ...; tile 0 has the last keys."""
        first, count = jnp.int32(1), keys.hi - keys.lo
        masked_step = functools.partial(step, masked=True)
        full_step = functools.partial(step, masked=False)
        if not self.masked:
            return lax.fori_loop(first, count, full_step, carry)
        after_right = jnp.maximum(keys.hi - keys.full_hi, 1)
        after_full = jnp.maximum(keys.hi - keys.full_lo, 1)
        carry = lax.fori_loop(first, after_right, masked_step, carry)
        carry = lax.fori_loop(after_right, after_full, full_step, carry)
        if self.segmented or self.spec.left is not None:
            carry = lax.fori_loop(after_full, count, masked_step, carry)
        return carry


def _zeros(shape: tuple[int, int]):
    return (
        plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout()).astype(jnp.float32) * 0.0
    )
