"""Streaming rows through a Hopper GPU: read once, reduced, written once.

A kernel that is bound by memory needs tens of KB in flight on every multiprocessor and nothing in
between that stalls them. Here a warpgroup owns a ring of slots in shared memory. The bulk copy
engine fills slots ahead; the warpgroup reads one into registers, reduces it, writes the result over
it and has the copy engine take it away. No warpgroup waits for another unless they share a row.

A row of up to a thousand columns belongs to one warp, several rows to a warpgroup. A longer row is
split in equal parts, one a warp, over one or two warpgroups.

Dims: R row, C column, A row or part in a warpgroup's slot, M column of a part, P part of a row.
"""

import dataclasses
import functools
import types
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS, WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .config import Stream, lane_layout, tile_layout
from .formula import Formula, Parts, RowCall, compiler_params, to_columns
from .smem import stream_scratch


def stream_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Stream,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; arguments as in ``apply.apply_rows``.

    There are no more results than inputs: each is written over an input's slot.
    """
    rows, columns = inputs_RC[0].shape
    assert formula.num_results <= len(inputs_RC)
    assert formula.num_row_results == 0
    assert formula.again is None
    assert formula.first_dtype is None
    kernel = _Stream(
        f=formula, c=config, shape=(rows, columns), dtype=inputs_RC[0].dtype,
        num_inputs=len(inputs_RC), num_vectors=len(vectors_C),
    )  # fmt: skip
    result = jax.ShapeDtypeStruct(kernel.tiled_shape, kernel.dtype)
    partial = (kernel.num_workers, config.group, WARPS, kernel.slot_shape[1])
    found = launch(
        kernel.run,
        name=formula.name,
        operands={
            "inputs": [x.reshape(kernel.tiled_shape) for x in inputs_RC],
            "vectors": [v.reshape(kernel.vector_shape) for v in vectors_C],
        },
        results={
            "results": [result] * formula.num_results,
            "sums": [jax.ShapeDtypeStruct(partial, jnp.float32)] * formula.num_sums,
        },
        scratch=stream_scratch(config, RowCall.of(formula, inputs_RC, vectors_C)),
        grid=(kernel.num_blocks,),
        grid_names=("block",),
        num_threads=config.num_warpgroups,
        compiler_params=compiler_params(kernel.dtype, 0),
    )
    return (
        tuple(x.reshape(rows, columns) for x in found["results"]),
        tuple(x.reshape(-1, columns) for x in found["sums"]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """The kernel of one call; methods are its phases, written once per trace."""

    f: Formula
    c: Stream
    shape: tuple[int, int]
    dtype: jnp.dtype
    num_inputs: int
    num_vectors: int

    @property
    def slot_shape(self) -> tuple[int, int]:
        return self.c.slot_shape(self.shape[1])

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
        return self.c.group, WARPS, self.slot_shape[1]

    @property
    def num_units(self) -> int:
        """What a team does at a time: one split row, or a slot of whole rows."""
        per_unit = self.slot_shape[0] if self.c.rows_per_warp else 1
        return self.shape[0] // per_unit

    @property
    def num_blocks(self) -> int:
        return min(NUM_PROCESSORS, -(-self.num_units // self.c.num_teams))

    @property
    def num_workers(self) -> int:
        return self.num_blocks * self.c.num_teams

    def run(self, gmem, smem) -> None:
        """One warpgroup."""
        c, f = self.c, self.f
        wg = lax.axis_index("wg")
        team, member = lax.div(wg, c.group), lax.rem(wg, c.group)
        me = types.SimpleNamespace(wg=wg, team=team, member=member)
        first = lax.axis_index("block") * c.num_teams + team
        stride = self.num_workers
        count = lax.div(jnp.maximum(self.num_units - first + stride - 1, 0), stride)
        layout = tile_layout(c.vector)
        parts = Parts(whole=bool(c.rows_per_warp))
        vector = functools.partial(self.vector, smem, me)

        def slot_of(i):
            """The place of this warpgroup's share of its i-th unit in memory."""
            unit = first + i * stride
            return unit if parts.whole else unit * c.group + member

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
            self.fetch_vectors(gmem, smem, wg)

        def step(i, sums):
            stage = lax.rem(i, c.num_stages)
            plgpu.barrier_wait(smem.full.at[wg * c.num_stages + stage])

            def load(j):
                slot = getattr(smem, f"input{j}").at[wg, stage]
                return plgpu.load(slot, layout=layout, optimized=False).astype(jnp.float32)

            numbers = f.fold(load, vector)
            if not parts.whole:
                numbers = self.exchange(smem, me, lax.rem(i, 2), numbers)
            totals = [to_columns(x, self.slot_shape) for x in f.join(parts, *numbers)]
            # Inputs are read again: held across the exchange they would cost a register a column.
            results, addends = f.finish(load, vector, totals)
            # The slot of the unit before this one has had this unit's time to be read out.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            ahead = i + (c.num_stages - 1)
            pl.when(ahead < count)(functools.partial(fetch, ahead))
            for j, result in enumerate(results):
                getattr(smem, f"input{j}")[wg, stage] = result.astype(self.dtype)
            plgpu.commit_smem()
            for j, out in enumerate(gmem.results):
                slot = getattr(smem, f"input{j}").at[wg, stage]
                plgpu.copy_smem_to_gmem(slot, out.at[slot_of(i)])
            return tuple(s + _over_warps(a) for s, a in zip(sums, addends, strict=True))

        zero = plgpu.layout_cast(jnp.zeros((WARPS, self.slot_shape[1]), jnp.float32), layout)
        sums = lax.fori_loop(0, count, step, (zero,) * f.num_sums)
        for ref, value in zip(gmem.sums, sums, strict=True):
            write_registers(value, ref.at[first, member])
        plgpu.wait_smem_to_gmem(0)

    def fetch_vectors(self, gmem, smem, wg) -> None:
        @pl.when(wg == 0)
        def _():
            for j, v in enumerate(gmem.vectors):
                plgpu.copy_gmem_to_smem(
                    v,
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

    def exchange(self, smem, me, turn, numbers: tuple[jax.Array, ...]) -> list[jax.Array]:
        """This warpgroup's numbers [A] to those of the row [P]."""
        c = self.c
        for j, number_A in enumerate(numbers):
            smem.numbers[me.team, turn, j, pl.ds(me.member * WARPS, WARPS)] = number_A
        plgpu.commit_smem()
        if c.group > 1:
            plgpu.barrier_arrive(smem.numbers_full.at[me.team])
            plgpu.barrier_wait(smem.numbers_full.at[me.team])
        layout = lane_layout(c.group * WARPS)
        return [
            plgpu.load(smem.numbers.at[me.team, turn, j], layout=layout, optimized=False)
            for j in range(self.f.num_numbers)
        ]


def _over_warps(x_AM: jax.Array) -> jax.Array:
    """Adds the rows of each warp: [4, M]."""
    rows, columns = x_AM.shape
    parts = [lax.slice(x_AM, (i, 0), (i + WARPS, columns)) for i in range(0, rows, WARPS)]
    return sum(parts[1:], parts[0])
