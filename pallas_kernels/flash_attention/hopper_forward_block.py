"""What the forward kernels for Hopper share: roles of warpgroups, order of blocks, the ring, turns.

Dims: as in ``hopper_forward``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.device import NUM_PROCESSORS

from .hopper_config import ForwardConfig, Fp8Config
from .hopper_geometry import TileRange, heads_per_wave, key_tiles
from .hopper_kernel import Kernel
from .hopper_tile import mask_tile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBlock(Kernel):
    """A block: 64 queries a compute warpgroup, over the key tiles that they see."""

    OPERAND_BYTES: ClassVar[int]  # of an element of keys and values

    c: ForwardConfig | Fp8Config

    def compute(self, gmem, smem, b, n, q0, keys: TileRange) -> None:
        """The role of a compute warpgroup."""
        raise NotImplementedError

    def copy_queries(self, gmem, smem, b, n, row0, w) -> None:
        """Starts the copies for 64 queries of warpgroup ``w``, which arrive at ``q_full``."""
        raise NotImplementedError

    def copy_keys(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copies of key tile ``tile``, the i-th visited, which arrive at ``k_full``."""
        raise NotImplementedError

    def copy_values(self, gmem, smem, b, kv_head, tile, i) -> None:
        """Starts the copy of the values of a tile, which arrives at ``v_full``."""
        raise NotImplementedError

    def run(self, gmem, smem) -> None:
        """One block: its tile's coordinates, then a role for each warpgroup."""
        g, c = self.g, self.c
        wg, (head, q_tile) = lax.axis_index("wg"), self.tile_of(lax.axis_index("tile"))
        b, n = lax.div(head, g.N), lax.rem(head, g.N)
        q0 = q_tile * c.block_q
        keys = key_tiles(self.spec, g, q0, c.block_q, c.block_kv)
        if self.segmented:
            keys = keys.meet(gmem.ranges, b, q_tile)
        keys = keys.ordered(at_least_one=True)

        @pl.when(wg < c.num_warpgroups)
        def _():
            plgpu.set_max_registers(240 if c.num_warpgroups == 2 else 160, action="increase")
            self.compute(gmem, smem, b, n, q0, keys)

        @pl.when(wg == c.num_warpgroups)
        def _():
            # 2 * 240 + 24 and 3 * 160 + 32 registers a thread is what a multiprocessor has: asking
            # for more does not fail, it waits for ever.
            plgpu.set_max_registers(24 if c.num_warpgroups == 2 else 32, action="decrease")
            self.load(gmem, smem, b, n, q0, keys)

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
        """Queries once, then keys and values into the ring, as compute warpgroups empty it."""
        c = self.c
        kv_head = lax.div(n, self.g.group)
        for w in range(c.num_warpgroups):
            self.copy_queries(gmem, smem, b, n, q0 + 64 * w, w)

        def step(i, _):
            slot, tile = lax.rem(i, c.num_stages), keys.hi - 1 - i
            plgpu.barrier_wait(smem.k_empty.at[slot])
            self.copy_keys(gmem, smem, b, kv_head, tile, i)
            plgpu.barrier_wait(smem.v_empty.at[slot])
            self.copy_values(gmem, smem, b, kv_head, tile, i)

        lax.fori_loop(0, keys.hi - keys.lo, step, None)
        if not self.interpretable:  # the interpreter knows no prefetch
            self.prefetch(gmem, lax.axis_index("tile") + NUM_PROCESSORS)
        for slot in range(c.num_stages):
            plgpu.barrier_wait(smem.k_empty.at[slot])
            plgpu.barrier_wait(smem.v_empty.at[slot])

    def prefetch(self, gmem, block: jax.Array) -> None:
        """Into L2, what a later block reads first; by its positions, for ids would be waited for.

        The blocks of this kernel end at about the same time, so that this multiprocessor will run
        that block or one beside it: its wait for memory is then the short one for L2. With another
        number of multiprocessors it comes early or late.
        """
        g, c = self.g, self.c
        count = g.B * g.N * self.num_q_tiles
        there = block < count
        head, q_tile = self.tile_of(jnp.minimum(block, count - 1))
        b, n, q0 = lax.div(head, g.N), lax.rem(head, g.N), q_tile * c.block_q
        keys = key_tiles(self.spec, g, q0, c.block_q, c.block_kv).ordered(at_least_one=True)
        first = pl.ds((keys.hi - 1) * c.block_kv, c.block_kv)
        for w in range(c.num_warpgroups):
            plgpu.async_prefetch(gmem.q.at[b, pl.ds(q0 + 64 * w, 64), n], predicate=there)
        plgpu.async_prefetch(gmem.k.at[b, first, lax.div(n, g.group)], predicate=there)

    def with_turns(self, smem, attend: Callable[[], Any]) -> Any:
        """``attend`` when the queries are there, every slot free, and the first turn given."""
        c = self.c
        wg = lax.axis_index("wg")
        for slot in range(c.num_stages):
            plgpu.barrier_arrive(smem.k_empty.at[slot])
            plgpu.barrier_arrive(smem.v_empty.at[slot])
        if c.ping_pong:
            pl.when(wg == c.num_warpgroups - 1)(lambda: plgpu.barrier_arrive(smem.turn.at[0]))
        plgpu.barrier_wait(smem.q_full)
        result = attend()
        if c.ping_pong:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(smem.turn.at[0]))
        return result

    def walk(self, keys: TileRange, step: Callable[..., Any], carry, loop=lax.fori_loop):
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

    def mask_positions(self, s, row0, col0):
        """-inf where the query of a row does not see the key of a column, by their positions."""
        aligned = row0 + self.g.diagonal - col0
        left, right = self.spec.left, self.spec.right
        return mask_tile(
            s,
            fill=-jnp.inf,
            diag_max=None if right is None else aligned + right,
            diag_min=None if left is None else aligned - left,
            num_cols=self.g.S - col0 if self.ragged else None,
        )
