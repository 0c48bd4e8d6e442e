"""Rows of tens of thousands of columns on a Hopper GPU: read once, kept in shared memory, written.

A block of four warpgroups holds a whole row of 32,768 columns, a cluster of blocks a longer one.
The copy engine fills a ring of chunks ahead; a warpgroup folds each chunk of its share into a few
numbers a row, all exchange these, and a second turn over the chunks writes the result straight from
registers, which frees each chunk for the next row. What belongs to a column, a scale or a sum over
rows, stays in registers. Of 132 multiprocessors 120 can form clusters of four or eight that go on
from row to row. Where nothing belongs to columns, blocks take one row and end, several of them on a
multiprocessor (``row_choice``).

Dims: R row, C column, A part of a row in a warpgroup, M column of a tile, P part of a row.
"""

import dataclasses
import functools
import itertools
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
from .config import Wide, tile_layout
from .exchange import begin, receive, send
from .formula import Formula, Parts, RowCall, to_columns, to_parts
from .smem import wide_scratch


def wide_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Wide,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; arguments as in ``apply.apply_rows``."""
    needed = config.chunks * (2 if config.ahead else 1)
    assert config.slots >= needed, f"{config} keeps {needed} chunks"
    assert formula.again is None or not config.ahead
    kernel = _Wide(
        f=formula, c=config, num_rows=inputs_RC[0].shape[0], dtype=inputs_RC[0].dtype,
        num_inputs=len(inputs_RC), num_vectors=len(vectors_C),
    )  # fmt: skip
    return call_clusters(
        kernel.run, formula, inputs_RC, vectors_C, config=config, row_shape=kernel.row_shape,
        num_workers=kernel.num_workers,
        scratch=wide_scratch(config, RowCall.of(formula, inputs_RC, vectors_C)),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Wide:
    """The kernel of one call; methods are its phases, written once per trace."""

    f: Formula
    c: Wide
    num_rows: int
    dtype: jnp.dtype
    num_inputs: int
    num_vectors: int

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.c.cluster, self.c.warpgroups, self.c.chunks, self.c.tiles, WARPS, self.c.tile

    @property
    def num_workers(self) -> int:
        return self.num_rows if self.c.row_a_block else min(self.c.num_clusters, self.num_rows)

    def run(self, gmem, smem) -> None:
        """One warpgroup."""
        c, f = self.c, self.f
        layout, parts = tile_layout(c.vector), Parts(whole=False)
        worker = lax.axis_index("worker")
        me = types.SimpleNamespace(wg=lax.axis_index("wg"), rank=lax.axis_index("cluster"))
        count = lax.div(self.num_rows - worker + self.num_workers - 1, self.num_workers)

        def place(q):
            """Of this warpgroup's q-th chunk: its row, which chunk of it, its slot."""
            row = worker + lax.div(q, c.chunks) * self.num_workers
            return row, lax.rem(q, c.chunks), lax.rem(q, c.slots)

        def fetch(q, slot):
            row, chunk, _ = place(q)
            for j, x in enumerate(gmem.inputs):
                plgpu.copy_gmem_to_smem(
                    x.at[row, me.rank, me.wg, chunk],
                    getattr(smem, f"input{j}").at[me.wg, slot],
                    smem.full.at[me.wg * c.slots + slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        def fetch_if_any(q):
            if f.num_sums:
                # Behind a branch the compiler would add to a row's sums at its end, and till then
                # keep the addends in registers. So beyond the end the last chunk comes again.
                fetch(jnp.minimum(q, count * c.chunks - 1), lax.rem(q, c.slots))
            else:
                pl.when(q < count * c.chunks)(functools.partial(fetch, q, lax.rem(q, c.slots)))

        def input_of(slot, tile):
            def load(j):
                ref = getattr(smem, f"input{j}").at[me.wg, slot, tile]
                return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

            return load

        held = {}
        num_held = c.chunks * c.tiles - c.in_memory

        def vector_of(chunk, tile):
            k = chunk * c.tiles + tile
            if k < num_held:
                return lambda j: held[j, k]

            def load(j):
                ref = getattr(smem, f"vector{j}").at[me.wg, k - num_held]
                return plgpu.load(ref, layout=layout, optimized=False)

            return load

        def fold(i):
            numbers = None
            for chunk in range(c.chunks):
                _, _, slot = place(i * c.chunks + chunk)
                plgpu.barrier_wait(smem.full.at[me.wg * c.slots + slot])
                for tile in range(c.tiles):
                    more = f.fold(input_of(slot, tile), vector_of(chunk, tile))
                    seen = (chunk * c.tiles + tile) * c.tile
                    numbers = f.merge(seen, c.tile, numbers, more) if numbers else more
            assert numbers is not None
            send(c, smem, me, i * f.num_turns, numbers)

        def fold_again(again, i, totals):
            numbers = None
            for chunk, tile in itertools.product(range(c.chunks), range(c.tiles)):
                _, _, slot = place(i * c.chunks + chunk)
                more = again.fold(input_of(slot, tile), vector_of(chunk, tile), totals)
                numbers = again.merge(numbers, more) if numbers else more
            assert numbers is not None
            send(c, smem, me, i * f.num_turns + 1, numbers)
            return again.join(parts, *receive(c, smem, i * f.num_turns + 1, again.num_numbers))

        def finish(i, sums):
            of_row = f.join(parts, *receive(c, smem, i * f.num_turns, f.num_numbers))
            totals = [to_columns(x, (WARPS, c.tile)) for x in of_row]
            if f.again is not None:
                of_row = fold_again(f.again, i, totals)
                totals += [to_columns(x, (WARPS, c.tile)) for x in of_row]
            last = of_row[len(of_row) - f.num_row_results :]
            for out, total in zip(gmem.of_rows, last, strict=True):
                total_A = to_parts(total, layout)
                write_registers(total_A, out.at[place(i * c.chunks)[0], me.rank, me.wg])
            kept = []
            for chunk in range(c.chunks):
                q = i * c.chunks + chunk
                row, _, slot = place(q)
                for tile in range(c.tiles):
                    results, addends = f.finish(
                        input_of(slot, tile), vector_of(chunk, tile), totals
                    )
                    mine = sums[len(kept) : len(kept) + f.num_sums]
                    kept += [s + a for s, a in zip(mine, addends, strict=True)]
                    for out, result in zip(gmem.results, results, strict=True):
                        part = out.at[row, me.rank, me.wg, chunk, tile]
                        write_registers(result.astype(out.dtype), part)
                plgpu.commit_smem()  # all warps have read the slot
                fetch_if_any(q + c.slots)
            return tuple(kept)

        for q in range(c.slots):
            fetch_if_any(jnp.int32(q))
        begin(c, smem)
        for j, k in itertools.product(range(self.num_vectors), range(num_held)):
            ref = gmem.vectors[j].at[me.rank, me.wg, *divmod(k, c.tiles)]
            held[j, k] = plgpu.load(ref, layout=layout, optimized=False)
        if self.num_vectors and c.in_memory:
            self.fetch_vectors(gmem, smem, me)
        zero = plgpu.layout_cast(jnp.zeros((WARPS, c.tile), jnp.float32), layout)
        sums = (zero,) * (f.num_sums * c.chunks * c.tiles)
        if c.ahead:
            fold(jnp.int32(0))

            def step(i, sums):
                fold(i + 1)
                return finish(i, sums)

            sums = lax.fori_loop(0, count - 1, step, sums)
            sums = finish(count - 1, sums)
        else:

            def step(i, sums):
                fold(i)
                return finish(i, sums)

            sums = lax.fori_loop(0, count, step, sums)
        if f.num_sums:
            for slot in range(c.slots):  # a block must not end before its copies
                plgpu.barrier_wait(smem.full.at[me.wg * c.slots + slot])
        for k, value in enumerate(sums):
            tile, j = divmod(k, f.num_sums)
            part = gmem.sums[j].at[worker, me.rank, me.wg, *divmod(tile, c.tiles)]
            write_registers(value, part)

    def fetch_vectors(self, gmem, smem, me) -> None:
        @pl.when(me.wg == 0)
        def _():
            c = self.c
            num_tiles = c.chunks * c.tiles
            tiles = itertools.product(
                range(self.num_vectors), range(c.warpgroups), range(c.in_memory)
            )
            for j, wg, k in tiles:
                place = divmod(num_tiles - c.in_memory + k, c.tiles)
                plgpu.copy_gmem_to_smem(
                    gmem.vectors[j].at[me.rank, wg, *place],
                    getattr(smem, f"vector{j}").at[wg, k],
                    smem.vectors_full,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        plgpu.barrier_wait(smem.vectors_full)
