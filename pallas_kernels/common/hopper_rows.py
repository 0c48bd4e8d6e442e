"""Streaming rows through a Hopper GPU: read once, reduced, written once.

A kernel that is bound by memory needs tens of KB in flight on every multiprocessor and nothing in
between that stalls them. Here a warpgroup owns a ring of slots in shared memory. The bulk copy
engine fills slots ahead; the warpgroup reads one into registers, reduces it, writes the result over
it and has the copy engine take it away. No warpgroup waits for another unless they share a row.

A row of up to a few thousand columns belongs to one warp, several rows to a warpgroup. A longer row
is split in equal parts, one a warp, over one or more warpgroups of a block and over the blocks of a
cluster: 8 blocks hold a row of 1 MB. Each warp's partial sums go into the shared memory of every
block of the row, one exchange a row.

Dims: R row, C column, A row or part in a warpgroup's slot, M column of a part, P part of a row.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_rows_config import LANES, WARPS, Config

NUM_PROCESSORS = 132


def tile_layout(vector: int):
    """[A, M]: a row or part to a warp, ``vector`` columns to a lane."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def lane_layout(num_parts: int):
    """[P]: every warp has all parts, spread over its lanes."""
    width = min(num_parts, LANES)
    spread = (-2,) if width == LANES else (plgpu.Replicated(LANES // width), -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((width,), (1,))),
        warp_dims=(plgpu.Replicated(WARPS),),
        lane_dims=spread,
        vector_dim=-1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a formula sees of the warpgroup's share of a row."""

    load: Callable[[int], jax.Array]  # input i as fp32 [A, M]
    vector: Callable[[int], jax.Array]  # per-column vector i as fp32 [A, M]
    gather: Callable[..., tuple[jax.Array, ...]]  # (combine, [A] each) to scalars of the row
    whole: bool  # a warp has the whole row: there is nothing to gather

    def total(self, *parts_A: jax.Array) -> tuple[jax.Array, ...]:
        """Sums over the row: [A] for whole rows, else scalars."""
        if self.whole:
            return parts_A
        return self.gather(lambda *x: tuple(jnp.sum(x_P) for x_P in x), *parts_A)

    def spread(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A number a row, [A] or scalar, to all its columns."""
        return lax.broadcast_in_dim(x, shape, [0] if x.ndim else [])


type Combine = Callable[..., tuple[jax.Array, ...]]
"""Statistics of all parts of a row, [P] each, to those of the whole, scalars."""

type Formula = Callable[[Row, tuple[jax.Array, ...]], tuple[jax.Array, tuple[jax.Array, ...]]]
"""(row, accumulators [4, M]) to (result [A, M] fp32, accumulators)."""


def stream_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Config,
    num_statistics: int,
    vectors_C: Sequence[jax.Array] = (),
    num_accumulators: int = 0,
) -> tuple[jax.Array, ...]:
    """Applies a formula to every row.

    Args:
        formula: traced once; what it gathers, it gathers once.
        inputs_RC: of one shape and dtype.
        config: ``C`` is a multiple of its parts times 32 * vector.
        num_statistics: numbers a row that the formula gathers.
        vectors_C: fp32, the same for all rows, kept in shared memory.
        num_accumulators: sums over rows, [C] each.

    Returns:
        The result, of the inputs' shape and dtype, and the accumulators' partial sums, fp32 [N, C].
    """
    rows, columns = inputs_RC[0].shape
    kernel = _Stream(
        formula=formula, c=config, shape=(rows, columns), dtype=inputs_RC[0].dtype,
        num_inputs=len(inputs_RC), num_vectors=len(vectors_C), num_statistics=num_statistics,
        num_accumulators=num_accumulators,
    )  # fmt: skip
    tiled = kernel.tiled_shape
    out_type = [jax.ShapeDtypeStruct(tiled, kernel.dtype)]
    parts = config.cluster * config.group
    partial = (kernel.num_workers, parts, WARPS, kernel.slot_shape[1])
    out_type += [jax.ShapeDtypeStruct(partial, jnp.float32)] * num_accumulators
    scratch = kernel.scratch()
    num_operands = len(inputs_RC) + len(vectors_C)

    def body(*refs):
        gmem = types.SimpleNamespace(
            inputs=refs[: len(inputs_RC)],
            vectors=refs[len(inputs_RC) : num_operands],
            out=refs[num_operands],
            partials=refs[num_operands + 1 : num_operands + 1 + num_accumulators],
        )
        smem = dict(zip(scratch, refs[num_operands + len(out_type) :], strict=True))
        kernel.run(gmem, types.SimpleNamespace(**smem))

    out, *partials = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=tuple(scratch.values()),
        grid=(kernel.num_clusters,),
        grid_names=("worker",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=config.num_warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(
        *(x.reshape(tiled) for x in inputs_RC),
        *(v.reshape(kernel.vector_shape) for v in vectors_C),
    )
    return out.reshape(kernel.shape), *(x.reshape(-1, columns) for x in partials)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """The kernel of one call; methods are its phases, written once per trace."""

    formula: Formula
    c: Config
    shape: tuple[int, int]
    dtype: jnp.dtype
    num_inputs: int
    num_vectors: int
    num_statistics: int
    num_accumulators: int

    @property
    def slot_shape(self) -> tuple[int, int]:
        """(A, M)."""
        if self.c.rows_per_warp:
            return WARPS * self.c.rows_per_warp, self.shape[1]
        return WARPS, self.shape[1] // self.c.num_parts

    @property
    def tiled_shape(self) -> tuple[int, int, int]:
        """An input as slots: consecutive ones are consecutive memory."""
        A, M = self.slot_shape
        return self.shape[0] * self.shape[1] // (A * M), A, M

    @property
    def vector_shape(self) -> tuple[int, ...]:
        """A per-column vector as parts."""
        if self.c.rows_per_warp:
            return (1, 1, self.shape[1])
        return self.c.cluster * self.c.group, WARPS, self.slot_shape[1]

    @property
    def num_units(self) -> int:
        """What a team does at a time: one split row, or a slot of whole rows."""
        per_unit = self.slot_shape[0] if self.c.rows_per_warp else 1
        return self.shape[0] // per_unit

    @property
    def num_clusters(self) -> int:
        # Clusters of 4 and 8 find 120 of an H200's 132 multiprocessors; more would run in a second
        # wave (norm/NOTES.md).
        most = NUM_PROCESSORS // self.c.cluster * 120 // (132 if self.c.cluster > 2 else 120)
        return min(most, -(-self.num_units // self.c.num_teams))

    @property
    def num_workers(self) -> int:
        return self.num_clusters * self.c.num_teams

    def scratch(self) -> dict[str, Any]:
        c = self.c
        A, M = self.slot_shape
        slots = (c.num_warpgroups, c.num_stages, A, M)
        buffers: dict[str, Any] = {
            f"input{i}": plgpu.SMEM(slots, self.dtype) for i in range(self.num_inputs)
        }
        for i in range(self.num_vectors):
            buffers[f"vector{i}"] = plgpu.SMEM((c.group, *self.vector_shape[1:]), jnp.float32)
        buffers["full"] = plgpu.Barrier(
            num_arrivals=self.num_inputs, num_barriers=c.num_warpgroups * c.num_stages
        )
        if self.num_vectors:
            buffers["vectors_full"] = plgpu.Barrier(num_arrivals=self.num_vectors)
        if not c.rows_per_warp:
            # In turns, so that one barrier an exchange is enough.
            shape = (c.num_teams, 2, self.num_statistics)
            buffers["parts"] = plgpu.SMEM((*shape, c.group * WARPS), jnp.float32)
            if c.group > 1:
                buffers["parts_full"] = plgpu.Barrier(
                    num_arrivals=c.group, num_barriers=c.num_teams
                )
            if c.cluster > 1:
                buffers["totals"] = plgpu.SMEM((*shape, c.cluster), jnp.float32)
                buffers["totals_full"] = plgpu.ClusterBarrier(
                    collective_axes=("cluster",), num_barriers=c.num_teams
                )
        return buffers

    def run(self, gmem, smem) -> None:
        """One warpgroup."""
        c = self.c
        wg = lax.axis_index("wg")
        team, member = lax.div(wg, c.group), lax.rem(wg, c.group)
        first = lax.axis_index("worker") * c.num_teams + team
        stride = self.num_workers
        count = lax.div(jnp.maximum(self.num_units - first + stride - 1, 0), stride)
        share = lax.axis_index("cluster") * c.group + member
        me = types.SimpleNamespace(wg=wg, team=team, member=member, share=share)
        layout = tile_layout(c.vector)

        def slot_of(i):
            """The place of this warpgroup's share of its i-th unit in memory."""
            unit = first + i * stride
            return unit if c.rows_per_warp else unit * (c.cluster * c.group) + share

        def fetch(i):
            stage = lax.rem(i, c.num_stages)
            for j, x in enumerate(gmem.inputs):
                plgpu.copy_gmem_to_smem(
                    x.at[slot_of(i)],
                    getattr(smem, f"input{j}").at[wg, stage],
                    smem.full.at[wg * c.num_stages + stage],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        for i in range(c.num_stages - 1):
            pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
        if self.num_vectors:
            self.fetch_vectors(gmem, smem, me)

        def step(i, accumulators):
            stage = lax.rem(i, c.num_stages)
            plgpu.barrier_wait(smem.full.at[wg * c.num_stages + stage])

            def load(j):
                slot = getattr(smem, f"input{j}").at[wg, stage]
                return plgpu.load(slot, layout=layout, optimized=False).astype(jnp.float32)

            row = Row(
                load=load,
                vector=functools.partial(self.vector, smem, me),
                gather=functools.partial(self.gather, smem, me, lax.rem(i, 2)),
                whole=bool(c.rows_per_warp),
            )
            result, accumulators = self.formula(row, accumulators)
            # The slot of the unit before this one has had this unit's time to be read out.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            ahead = i + (c.num_stages - 1)
            pl.when(ahead < count)(functools.partial(fetch, ahead))
            smem.input0[wg, stage] = result.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.input0.at[wg, stage], gmem.out.at[slot_of(i)])
            return accumulators

        zeros = plgpu.layout_cast(jnp.zeros((WARPS, self.slot_shape[1]), jnp.float32), layout)
        accumulators = lax.fori_loop(0, count, step, (zeros,) * self.num_accumulators)
        for ref, value in zip(gmem.partials, accumulators, strict=True):
            ref[first, share] = value
        plgpu.wait_smem_to_gmem(0)

    def fetch_vectors(self, gmem, smem, me) -> None:
        @pl.when(me.wg == 0)
        def _():
            for j, v in enumerate(gmem.vectors):
                rank = lax.axis_index("cluster")
                size = 1 if self.c.rows_per_warp else self.c.group
                plgpu.copy_gmem_to_smem(
                    v.at[pl.ds(rank * size, size)],
                    getattr(smem, f"vector{j}"),
                    smem.vectors_full,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        plgpu.barrier_wait(smem.vectors_full)

    def vector(self, smem, me, j: int) -> jax.Array:
        ref, layout = getattr(smem, f"vector{j}"), tile_layout(self.c.vector)
        if not self.c.rows_per_warp:
            return plgpu.load(ref.at[me.member], layout=layout, optimized=False)
        x_M = plgpu.load(ref.at[0, 0], layout=layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x_M, self.slot_shape, [1])

    def gather(self, smem, me, turn, combine: Combine, *parts_A: jax.Array):
        c = self.c
        for j, part_A in enumerate(parts_A):
            smem.parts[me.team, turn, j, pl.ds(me.member * WARPS, WARPS)] = part_A
        plgpu.commit_smem()
        if c.group > 1:
            plgpu.barrier_arrive(smem.parts_full.at[me.team])
            plgpu.barrier_wait(smem.parts_full.at[me.team])
        totals = combine(*self.everyones(smem.parts.at[me.team, turn], c.group * WARPS))
        if c.cluster == 1:
            return totals

        @pl.when(me.member == 0)
        def _():
            for j, total in enumerate(totals):
                mine = smem.totals.at[me.team, turn, j, lax.axis_index("cluster")]
                mine[...] = total
                _to_cluster(mine, c.cluster)
            plgpu.commit_smem()
            cluster_fence()
            plgpu.barrier_arrive(smem.totals_full.at[me.team])

        plgpu.barrier_wait(smem.totals_full.at[me.team])
        cluster_fence()
        return combine(*self.everyones(smem.totals.at[me.team, turn], c.cluster))

    def everyones(self, ref, count: int) -> list[jax.Array]:
        layout = lane_layout(count)
        return [
            plgpu.load(ref.at[j], layout=layout, optimized=False)
            for j in range(self.num_statistics)
        ]


def _to_cluster(ref, num_blocks: int) -> None:
    """Copies an fp32 number of this block's shared memory to the same place in all its cluster."""
    # A thread a block. Each reads what it has just written itself.
    ptx = f"""{{
        .reg .pred active;
        .reg .u32 thread, peer;
        .reg .f32 value;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.lt.u32 active, thread, {num_blocks};
        @active ld.shared.f32 value, [$0];
        @active mapa.shared::cluster.u32 peer, $0, thread;
        @active st.shared::cluster.f32 [peer], value;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def copy(_, ref):
        mgpu_utils.inline_ptx(ptx, mgpu_utils.memref_ptr(ref), has_side_effects=True)

    copy(ref)


def cluster_fence() -> None:
    """Orders shared memory accesses of one thread against those of the cluster's other blocks."""

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu_utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()
