"""The kernel that merges each query head's partial results by their logsumexps.

The rule is that of ``pallas_kernels.common.merge``. A block has four heads of a token, one per
warp. It reads several partial results at a time, to wait for memory only once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import LOG2E
from pallas_kernels.paged_attention.spec import PagedCall
from pallas_kernels.rows.config import tile_layout

from .attend import NO_MAXIMUM
from .config import MERGED_ROWS, PagedConfig, QueryLayout
from .plan import PagePlan, team_of
from .reader import Partials

HELD = 1024  # columns of partial results that a warp reads at a time


def merge_pages(
    call: PagedCall,
    plan: PagePlan,
    partials: Partials,
    *,
    layout: QueryLayout,
    config: PagedConfig,
) -> jax.Array:
    """Merges segments' partial results into attention [B, T, N, V] in the queries' dtype."""
    g = layout
    kernel = _MergePages(
        g=g, c=config, dtype=call.q_BTNH.dtype, sinks=call.sinks_N is not None,
        only_cut=partials.whole is not None,
    )  # fmt: skip
    operands: dict[str, Any] = {"out": partials.out, "lse": partials.lse, "before": plan.before_E1}
    if call.sinks_N is not None:
        operands["sinks"] = jnp.pad(call.sinks_N * LOG2E, (0, MERGED_ROWS))
    shape = (g.B, g.T, g.K * g.merged_group, g.V)
    results = {"merged": jax.ShapeDtypeStruct(shape, call.q_BTNH.dtype)}
    if partials.whole is not None:
        operands["merged"], results = jax.new_ref(partials.whole), {}
    found = operands | launch(
        kernel.run,
        name="paged_attention_merge",
        operands=operands,
        results=results,
        scratch={},
        grid=(g.B * g.T * g.K * g.merged_group // MERGED_ROWS,),
        grid_names=("unit",),
        num_threads=1,
        params=dict(approx_math=True, reduction_scratch_bytes=0),
    )
    if partials.whole is not None:
        return jax.freeze(found["merged"])
    merged = found["merged"].reshape(g.B, g.T, g.K, g.merged_group, g.V)
    return merged[:, :, :, : g.group].reshape(g.B, g.T, g.N, g.V)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _MergePages:
    """Kernel that merges the partial results of one call."""

    g: QueryLayout
    c: PagedConfig
    dtype: jnp.dtype
    sinks: bool
    only_cut: bool  # rows that are not cut have their results

    def run(self, gmem, smem) -> None:
        """Runs one block: four query heads of a token."""
        del smem
        g = self.g
        per_group = g.merged_group // MERGED_ROWS
        unit = lax.axis_index("unit")
        unit, part = lax.div(unit, per_group), lax.rem(unit, per_group)
        unit, head = lax.div(unit, g.K), lax.rem(unit, g.K)
        b, t = lax.div(unit, g.T), lax.rem(unit, g.T)
        # Where the query tiles have these heads.
        row = lax.rem(head * g.group, 8) + part * MERGED_ROWS
        entry = (b * g.num_q_tiles) + lax.div(t, g.tokens) * g.tiles_per_token
        if g.tiles_per_token > 1:
            entry += lax.div(row, g.tile)
            row = lax.rem(row, g.tile)
        row += lax.rem(t, g.tokens) * g.span
        count, first = self.parts(gmem, entry, head)

        def merge():
            self.merge(gmem, (b, t, head, part), self.sum(gmem, head, row, count, first))

        if self.only_cut:
            pl.when(count != 1)(merge)
        else:
            merge()

    def merge(self, gmem, place, sums) -> None:
        """Normalizes sums and writes them."""
        (b, t, head, part), (peak, total, out), g = place, sums, self.g
        if self.sinks:
            at = pl.ds(head * g.group + part * MERGED_ROWS, MERGED_ROWS)
            sink = plgpu.load(gmem.sinks.at[at], layout=self.layout.reduce(1), optimized=False)
            top = jnp.maximum(peak, sink)
            shrink = jnp.exp2(peak - top)
            total = total * shrink + jnp.exp2(sink - top)
            out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
        factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
        out = out * lax.broadcast_in_dim(factor, out.shape, [0])
        heads = pl.ds(head * g.merged_group + part * MERGED_ROWS, MERGED_ROWS)
        gmem.merged[b, t, heads] = out.astype(self.dtype)

    @property
    def layout(self):
        """Layout of four rows, one per warp."""
        assert MERGED_ROWS == WARPS
        return tile_layout(next(v for v in (4, 2, 1) if self.g.V % (LANES * v) == 0))

    def parts(self, gmem, entry, head) -> tuple:
        """Number of a segment's partial results, and the first one, in teams' members."""
        g = self.g
        members = self.c.team(g)
        head_blocks, block = g.K // members, lax.div(head, members)
        before = gmem.before[entry]
        tiles = lax.div(gmem.before[entry + 1] - before, head_blocks)
        start, total, num_teams = (
            before + block * tiles,
            gmem.before[g.num_entries],
            self.c.num_teams(g),
        )
        first = team_of(start, total, num_teams)
        last = team_of(start + jnp.maximum(tiles - 1, 0), total, num_teams)
        count = jnp.where(tiles > 0, last - first + 1, 0)
        return count, first + entry * head_blocks + block

    def sum(self, gmem, head, row, count, base):
        """Maxima, sums of weights and weighted sums over the partial results of a segment."""
        g, layout = self.g, self.layout
        members = self.c.team(g)
        member = lax.rem(head, members)
        # Of more rows than workers, most have a part or two.
        many = g.num_entries * g.K >= self.c.num_teams(g) * members
        at_a_time = 2 if many else max(2, min(8, HELD // g.V))

        def some(i, carry):
            peak, total, out = carry
            lses, outs = [], []
            for j in range(at_a_time):
                at = i * at_a_time + j
                partial = (base + jnp.minimum(at, count - 1)) * members + member
                rows = pl.ds(row, MERGED_ROWS)
                lse = plgpu.load(
                    gmem.lse.at[partial, rows], layout=layout.reduce(1), optimized=False
                )
                lses.append(lse + jnp.where(at < count, 0.0, -jnp.inf))
                outs.append(plgpu.load(gmem.out.at[partial, rows], layout=layout, optimized=False))
            top = peak
            for lse in lses:
                top = jnp.maximum(top, lse)
            shrink = jnp.exp2(peak - top)
            total, out = total * shrink, out * lax.broadcast_in_dim(shrink, out.shape, [0])
            for lse, each in zip(lses, outs, strict=True):
                weight = jnp.exp2(lse - top)
                total += weight
                out += each * lax.broadcast_in_dim(weight, out.shape, [0])
            return top, total, out

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        carry = (
            full((MERGED_ROWS,), NO_MAXIMUM, layout.reduce(1)),
            full((MERGED_ROWS,), 0.0, layout.reduce(1)),
            full((MERGED_ROWS, g.V), 0.0, layout),
        )
        return lax.fori_loop(0, lax.div(count + (at_a_time - 1), at_a_time), some, carry)
