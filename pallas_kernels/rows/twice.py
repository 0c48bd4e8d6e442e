"""Rows of any length through a Hopper GPU: read twice, written once.

For rows that fit no shared memory, or whose vectors and sums fit no registers. Nothing is kept from
one turn over a row to the next: a first turn folds its chunks into a few numbers, which the blocks
of the row exchange, a second reads them again and writes the results (a third, if the formula has
an ``again``). Few rows are at work at a time, so the later readings, the vectors and the sums,
which are added up in memory, mostly find their data in L2. The turns are loops: the kernel is as
long for a row of one chunk as of a hundred.

Dims: R row, C column, A part of a row in a warpgroup, M column of a tile, P part of a row.
"""

import functools
import types
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .clusters import call_clusters
from .config import Twice, tile_layout
from .exchange import begin, receive, send
from .formula import Formula, Parts, RowCall, to_columns, to_parts
from .smem import twice_scratch


def twice_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Twice,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; arguments as in ``apply.apply_rows``."""
    num_rows = inputs_RC[0].shape[0]
    num_workers = min(config.num_clusters, num_rows)
    return call_clusters(
        functools.partial(_run, formula, config, (num_rows, num_workers)),
        formula, inputs_RC, vectors_C, config=config, num_workers=num_workers,
        row_shape=(config.cluster, config.warpgroups, config.chunks, WARPS, config.tile),
        scratch=twice_scratch(config, RowCall.of(formula, inputs_RC, vectors_C)),
    )  # fmt: skip


def _run(f: Formula, c: Twice, sizes: tuple[int, int], gmem, smem) -> None:
    """One warpgroup."""
    num_rows, num_workers = sizes
    layout = tile_layout(c.vector)
    worker = lax.axis_index("worker")
    me = types.SimpleNamespace(wg=lax.axis_index("wg"), rank=lax.axis_index("cluster"))
    count = lax.div(num_rows - worker + num_workers - 1, num_workers)
    fetches = (f.num_turns + 1) * c.chunks  # a row
    parts = Parts(whole=False)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    def fetch(q):
        row = worker + lax.div(q, fetches) * num_workers
        slot = lax.rem(q, c.slots)
        for j, x in enumerate(gmem.inputs):
            plgpu.copy_gmem_to_smem(
                x.at[row, me.rank, me.wg, lax.rem(q, c.chunks)],
                getattr(smem, f"input{j}").at[me.wg, slot],
                smem.full.at[me.wg * c.slots + slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def fetch_if_any(q):
        pl.when(q < count * fetches)(functools.partial(fetch, q))

    def arrived(q):
        """Loads inputs of this warpgroup's q-th chunk, as soon as they are there."""
        slot = lax.rem(q, c.slots)
        plgpu.barrier_wait(smem.full.at[me.wg * c.slots + slot])
        return lambda j: load(getattr(smem, f"input{j}").at[me.wg, slot]).astype(jnp.float32)

    def leave(q):
        """Gives the slot of the q-th chunk away."""
        plgpu.commit_smem()  # all warps have read it
        fetch_if_any(q + c.slots)

    def vectors(chunk):
        return lambda j: load(gmem.vectors[j].at[me.rank, me.wg, chunk])

    def turn_again(again, i, totals):
        first = i * fetches + c.chunks

        def fold(chunk):
            numbers = again.fold(arrived(first + chunk), vectors(chunk), totals)
            leave(first + chunk)
            return numbers

        def merge(chunk, numbers):
            return again.merge(numbers, fold(chunk))

        send(c, smem, me, i * f.num_turns + 1, lax.fori_loop(1, c.chunks, merge, fold(0)))
        return again.join(parts, *receive(c, smem, i * f.num_turns + 1, again.num_numbers))

    def step(i, _):
        first = i * fetches

        def fold(chunk):
            numbers = f.fold(arrived(first + chunk), vectors(chunk))
            leave(first + chunk)
            return numbers

        def merge(chunk, numbers):
            seen_A = lax.broadcast_in_dim((chunk * c.tile).astype(jnp.float32), (WARPS,), ())
            return f.merge(seen_A, c.tile, numbers, fold(chunk))

        send(c, smem, me, i * f.num_turns, lax.fori_loop(1, c.chunks, merge, fold(0)))
        of_row = f.join(parts, *receive(c, smem, i * f.num_turns, f.num_numbers))
        totals = [to_columns(x, (WARPS, c.tile)) for x in of_row]
        if f.again is not None:
            of_row = turn_again(f.again, i, totals)
            totals += [to_columns(x, (WARPS, c.tile)) for x in of_row]
        last = of_row[len(of_row) - f.num_row_results :]
        for out, total in zip(gmem.of_rows, last, strict=True):
            total_A = to_parts(total, layout)
            write_registers(total_A, out.at[worker + i * num_workers, me.rank, me.wg])

        def finish(chunk, _):
            q = first + f.num_turns * c.chunks + chunk
            results, addends = f.finish(arrived(q), vectors(chunk), totals)
            place = (me.rank, me.wg, chunk)
            for out, result in zip(gmem.results, results, strict=True):
                result = result.astype(out.dtype)
                write_registers(result, out.at[worker + i * num_workers, *place])
            for out, addend in zip(gmem.sums, addends, strict=True):
                mine = out.at[worker, *place]
                write_registers(load(mine) + addend, mine)
            leave(q)
            return ()

        return lax.fori_loop(0, c.chunks, finish, ())

    def clear(chunk, _):
        zero = plgpu.layout_cast(jnp.zeros((WARPS, c.tile), jnp.float32), layout)
        for out in gmem.sums:
            write_registers(zero, out.at[worker, me.rank, me.wg, chunk])
        return ()

    for q in range(c.slots):
        fetch_if_any(jnp.int32(q))
    begin(c, smem)
    if f.num_sums:
        lax.fori_loop(0, c.chunks, clear, ())
    lax.fori_loop(0, count, step, ())
