"""The kernel that reads pages: workers read key tiles and write partial results of segments.

Decoding reads each key and value once and multiplies it with a few queries, so it is bound by
memory bandwidth. Blocks are persistent. A block has several workers, each with a warpgroup that
fills a ring of tiles and one that computes. Workers never wait for each other: while one computes,
the copies of all continue.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers, write_rows
from pallas_kernels.hopper.tile import (
    LOG2E,
    STRIP,
    row_layout,
    soft_cap,
    strips,
    sum_strips,
    swizzle_bytes,
    tile_layout,
    tiled,
)
from pallas_kernels.paged_attention.spec import PagedCall, PagedSpec

from .config import GROUP_ROWS, ROWS, PagedConfig, QueryLayout
from .plan import PagePlan
from .reader import PageKernel, Partials, Segment

# Finite, so that exp2(old maximum - new maximum) of a row that has seen no key is 1 and not NaN.
NO_MAXIMUM = -1e30
COLUMNS = 64  # of values that are loaded at a time to be cleaned


def attend_pages(
    call: PagedCall,
    plan: PagePlan,
    *,
    layout: QueryLayout,
    config: PagedConfig,
    interpretable: bool = False,
) -> Partials:
    """Computes normalized partial results of attention, with logsumexps, for all workers' segments.

    A segment is the part of a plan entry (a query tile, for a block of kv heads) that one team
    reads. The team's worker ``member`` writes its result at
    ``(team + segment) * members + member``.

    Args:
        call: a call whose number of heads is a multiple of 8.
        plan: the plan of this call, layout and config.
        layout, config: the call's sizes, and the tile sizes.
        interpretable: avoids what the interpreter lacks: accumulators that outlive a tile, matmul
            operands in registers.
    """
    kernel = _AttendPages(
        g=layout, c=config, spec=call.spec, dtype=call.q_BTNH.dtype, capacity=call.capacity,
        ragged_queries=call.query_lengths_B is not None,
        interpretable=interpretable,
        finishes=finishes(call, layout),
    )  # fmt: skip
    return kernel.partials(call, plan, rows=layout.rows, whole=kernel.finishes)


def finishes(call: PagedCall, layout: QueryLayout) -> bool:
    """Tells whether the kernel writes final results of rows that one worker reads alone.

    A final result has a fourth of a partial one's bytes, and writes cost more than reads.
    """
    whole_heads = layout.tiles_per_token == 1 and layout.group == layout.merged_group
    return layout.T == 1 and whole_heads and call.sinks_N is None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _AttendPages(PageKernel):
    """Kernel of one call over pages whose elements are multiplied as they are."""

    interpretable: bool
    finishes: bool

    def scratch(self) -> dict[str, Any]:
        g, c = self.g, self.c
        slots = c.num_workers * c.num_stages

        def tiles(*shape: int):
            return plgpu.SMEM(shape, self.dtype, transforms=tiled(swizzle_bytes(shape[-1])))

        buffers = {
            "q": tiles(c.num_workers, ROWS, g.H),
            "k": tiles(slots, c.block_kv, g.H),
            "v": tiles(slots, c.block_kv, g.V),
        }
        if self.interpretable:
            buffers["p"] = tiles(c.num_workers, ROWS, c.block_kv)
        return buffers | self.barriers()

    def compute(self, gmem, smem, worker) -> None:
        def segment(seg: Segment, done):
            plgpu.barrier_wait(smem.q_full.at[worker])
            attend = functools.partial(self.attend, smem, worker, seg, done)
            if self.interpretable:
                o, peak, total = attend(None)
            else:
                o, peak, total = pl.run_scoped(attend, plgpu.ACC((ROWS, self.g.V), jnp.float32))
            plgpu.barrier_arrive(smem.q_empty.at[worker])
            self.write_segment(gmem, seg, o, peak, total)

        self.each_segment(gmem, worker, segment)

    def attend(self, smem, worker, seg: Segment, done, acc):
        """Loops over a segment's tiles: unnormalized output, row maxima, row sums."""
        c, key_start, key_stop = self.c, seg.extent.begin, seg.extent.end
        positions = positions_less_columns(seg, self.g)
        q_smem = smem.q.at[worker]

        def step(i, carry):
            peak, total, *o = carry
            slot = worker * c.num_stages + lax.rem(done + i, c.num_stages)
            key0 = (seg.first + i) * c.block_kv
            plgpu.barrier_wait(smem.k_full.at[slot])

            def scores(s_acc):
                plgpu.wgmma(s_acc, q_smem, smem.k.at[slot].transpose((1, 0)))
                return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

            s = pl.run_scoped(scores, plgpu.ACC((ROWS, c.block_kv), jnp.float32))
            plgpu.barrier_arrive(smem.k_empty.at[slot])
            p, peak, total, alpha = softmax_step(self.spec, s, peak, total, positions - key0)
            plgpu.barrier_wait(smem.v_full.at[slot])
            v_smem = smem.v.at[slot]
            ragged = (key0 < key_start) | (key0 + c.block_kv > key_stop)
            pl.when(ragged)(lambda: clean(v_smem, key_start - key0, key_stop - key0))
            o = self.add_product(smem, acc, worker, p, v_smem, alpha, o)
            plgpu.barrier_arrive(smem.v_empty.at[slot])
            return peak, total, *o

        peak = plgpu.layout_cast(jnp.full((ROWS,), NO_MAXIMUM, jnp.float32), row_layout())
        total = plgpu.layout_cast(jnp.full((ROWS, STRIP), 0.0, jnp.float32), tile_layout())
        carry = (peak, total)
        if acc is None:
            carry += (plgpu.layout_cast(jnp.zeros((ROWS, self.g.V), jnp.float32), tile_layout()),)
        peak, total, *o = lax.fori_loop(0, seg.count, step, carry)
        o = o[0] if acc is None else plgpu.wgmma_accumulator_load(acc, wait_n=0)
        return o, peak, total.sum(axis=1)

    def add_product(self, smem, acc, mine, p, v_smem, alpha, o) -> list:
        """Computes ``o * alpha + p v`` in the accumulator."""
        p = p.astype(self.dtype)
        if acc is not None:
            so_far = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            acc[...] = so_far * lax.broadcast_in_dim(alpha, so_far.shape, [0])
            plgpu.wgmma(acc, p, v_smem)
            plgpu.wgmma_wait(0)
            return []
        smem.p[mine] = p
        plgpu.commit_smem()

        def product(acc):
            plgpu.wgmma(acc, smem.p.at[mine], v_smem)
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        new = pl.run_scoped(product, plgpu.ACC((ROWS, self.g.V), jnp.float32))
        return [o[0] * lax.broadcast_in_dim(alpha, new.shape, [0]) + new]

    def write_segment(self, gmem, seg: Segment, o, peak, total) -> None:
        """Normalizes a segment's result and writes it.

        Registers are written directly: TMA takes one request after another. A result would wait for
        all tiles asked for before it, and the next row's first tile for the result.
        """
        factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
        o = o * lax.broadcast_in_dim(factor, o.shape, [0])

        def leave_part():
            self.write(o, gmem.out.at[seg.partial])
            lse = jnp.where(total == 0.0, -jnp.inf, peak + jnp.log2(total))
            write_registers(lse, gmem.lse.at[seg.partial])

        if not self.finishes:
            leave_part()
            return
        pl.when(jnp.logical_not(seg.whole))(leave_part)
        group = self.g.group
        heads = gmem.whole.at[seg.row, 0, pl.ds(seg.head * group, group)]
        # Where the group begins among the heads that were copied.
        for first in sorted({head * group % GROUP_ROWS for head in range(self.g.K)}):
            here = lax.rem(seg.head * group, GROUP_ROWS) == first
            write = functools.partial(self.write, o.astype(self.dtype), heads, first=first)
            pl.when(seg.whole & here)(write)

    def write(self, tile, ref, *, first: int = 0) -> None:
        """Writes some of a tile's rows."""
        if self.interpretable:
            ref[...] = lax.slice(tile, (first, 0), (first + ref.shape[0], tile.shape[1]))
        else:
            write_rows(tile, ref, first=first)


def positions_less_columns(seg: Segment, layout: QueryLayout):
    """Returns int32 [64, 8]: position of each tile row's token minus the column index."""
    shape = (ROWS, STRIP)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tile_layout())
    position = seg.extent.position
    if layout.tokens == 1:
        return position - column
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout())
    token = lax.div(row, jnp.int32(layout.span))
    # A token that a row does not have is before all keys.
    return jnp.where(token < seg.extent.tokens, position + token, -1) - column


def softmax_step(spec: PagedSpec, s, peak, total, ahead):
    """Computes probabilities by the running row maximum, and the factors of older sums.

    Args:
        spec: the call's scale, soft cap and window.
        s: products of queries and keys.
        peak, total: row maxima (in units of log2) and sums so far.
        ahead: position of the row's token minus that of the column's key, for the first 8 columns.
    """
    if spec.soft_cap is None:
        s = s * (spec.scale * LOG2E)
    else:
        s = soft_cap(s, spec.scale, spec.soft_cap) * LOG2E
    masked = []
    for i, strip in enumerate(strips(s)):
        seen = ahead >= i * STRIP
        if spec.window is not None:
            seen = seen & (ahead < i * STRIP + spec.window)
        masked.append(jnp.where(seen, strip, -jnp.inf))
    s = jnp.concatenate(masked, axis=1)
    top = jnp.maximum(peak, s.max(axis=1))
    alpha = jnp.exp2(peak - top)
    p = jnp.exp2(s - lax.broadcast_in_dim(top, s.shape, [0]))
    total = total * lax.broadcast_in_dim(alpha, total.shape, [0]) + sum_strips(p)
    return p, top, total, alpha


def clean(v_smem, first, stop) -> None:
    """Zeroes values in shared memory outside of the row's keys, as 0 times NaN is NaN."""
    rows, width = v_smem.shape
    for column in range(0, width, COLUMNS):
        part = v_smem.at[:, pl.ds(column, COLUMNS)]
        v = plgpu.load(part, layout=tile_layout(), optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, (rows, COLUMNS), 0, layout=tile_layout())
        part[...] = jnp.where((row >= first) & (row < stop), v, 0.0)
    plgpu.commit_smem()
