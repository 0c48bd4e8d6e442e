"""Rows of any length on a Hopper GPU: read once by the copy engine, each as it lies between words.

As ``wide``, but that a row may begin behind the first element of a chunk and end within one
(``flat_copies``): what a slot has beside it belongs to neighbors and does not count. A chunk is
folded, the numbers of all chunks of a row are exchanged, and a second turn over the chunks writes
the results from registers, whole vectors of words.

Scales and sums over rows belong to columns, whose place within a vector differs from row to row,
but repeats after a period of 2, 4 or 8 rows. All rows of a block are multiples of the period apart
(``flat_order``), so a thread has the same columns of all of them: scales lie behind the same shift,
and sums are stored as if they were one more row.

A row belongs to the warpgroups of one or more blocks, or to a team of them, of one block or of
each, and one of one or two thousand columns to a warp, without an exchange.

Dims: R row, C column, A part of a row in a warpgroup or a warp's row, M column of a tile, P part.
"""

import functools
import types
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .config import Flat, tile_layout
from .counts import Count
from .exchange import begin, receive, send
from .flat_columns import RowColumns
from .flat_copies import FlatCopies
from .flat_interpreted import InterpretedCopies
from .flat_kernel import FlatKernel
from .flat_order import Order, period_of, reach_of, unit_of
from .flat_registers import added, read, widened, write
from .flat_vectors import Vectors
from .formula import Formula, RowCall, compiler_params, to_parts
from .smem import BARRIER_WORDS, REDUCTION_BYTES, flat_scratch


def flat_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Flat,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; arguments as in ``apply.apply_rows``."""
    c, (num_rows, columns), dtype = config, inputs_RC[0].shape, inputs_RC[0].dtype
    assert formula.may_cut, "columns that must not count have no value in this formula"
    assert formula.again is None
    assert formula.first_dtype is None
    assert formula.num_row_results == 0
    assert not (formula.num_sums and c.by_warps), "sums of four rows"
    call = RowCall.of(formula, inputs_RC, vectors_C)
    assert not (formula.uneven and c.by_warps) or call.has_columns, "warps' rows of several shifts"
    assert reach_of(c, call) <= c.columns, (columns, c)
    assert c.slots >= c.chunks * (2 if c.ahead else 1), c
    assert not (c.ahead and c.teams > 1), "a team that has no row folds none ahead"
    order = Order(config=c, num_rows=num_rows, period=period_of(c, call))
    unit = unit_of(c, call)
    kernel = FlatKernel(f=formula, c=c, order=order, columns=columns, dtype=dtype, unit=unit)
    flat, a_row = [x.reshape(-1) for x in inputs_RC], columns
    if c.interpretable:
        a_row = c.columns
        flat = [jnp.pad(x, (0, a_row + kernel.copies.word)) for x in flat]
    sums = kernel.sums
    found = launch(
        functools.partial(_run, kernel),
        name=formula.name,
        operands={"inputs": flat, "vectors": [kernel.shifted(v) for v in vectors_C]},
        results={
            "results": [jax.ShapeDtypeStruct((num_rows * a_row,), dtype)] * formula.num_results,
            "sums": [jax.ShapeDtypeStruct((sums.num_rows * a_row,), jnp.float32)]
            * formula.num_sums,
        },
        scratch=flat_scratch(c, call),
        grid=(order.num_workers,),
        grid_names=("worker",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=c.warpgroups,
        compiler_params=compiler_params(dtype, REDUCTION_BYTES),
    )
    if isinstance(sums, InterpretedCopies):
        whole = sums.whole
    else:
        whole = lambda x: x.reshape(-1, columns)  # noqa: E731
    return tuple(map(whole, found["results"])), tuple(map(whole, found["sums"]))


def _run(kernel: FlatKernel, gmem, smem) -> None:
    """One warpgroup."""
    wg = lax.axis_index("wg")
    team, member = lax.div(wg, kernel.c.members), lax.rem(wg, kernel.c.members)
    me = types.SimpleNamespace(wg=member, rank=lax.axis_index("cluster"))
    worker = lax.axis_index("worker")
    # Teams of other blocks first: few rows are spread over all multiprocessors.
    first = team * kernel.order.num_workers + worker
    _Team(kernel, gmem, smem, me, (wg, team, first), lax.rem(worker, kernel.order.period)).run()


class _Team:
    """What a warpgroup does with its team's rows."""

    def __init__(self, kernel: FlatKernel, gmem, smem, me, places, phase):
        self.k, self.f, self.c = kernel, kernel.f, kernel.c
        self.gmem, self.smem, self.me = gmem, smem, me
        self.wg, self.team, self.first = places
        self.phase = phase  # of the period
        self.slots = [getattr(smem, f"input{j}").at[self.wg] for j in range(len(gmem.inputs))]
        self.copies = kernel.copies
        self.layout = tile_layout(self.c.vector)
        self.shape = (WARPS, self.c.tile)
        self.order, self.stride = kernel.order, kernel.order.stride
        member = me.rank * self.c.members + me.wg
        self.own = RowColumns(kernel, member, self.row)
        left = jnp.maximum(self.order.num_turns - self.first + self.stride - 1, 0)
        self.count = lax.div(left, self.stride)
        # What is in registers, scales or sums, has no index: then chunks are written out.
        held = len(gmem.vectors) and self.c.in_memory < self.c.chunks
        self.static = bool(self.f.num_sums or held or self.c.chunks <= 2)

    def run(self) -> None:
        """All rows of the team."""
        c, f, gmem, me = self.c, self.f, self.gmem, self.me
        if isinstance(self.copies, FlatCopies):
            self.copies.begin(self.smem.full.at[self.wg], c.slots)
        for k in range(c.slots):
            self.fetch(jnp.int32(0), k)
        begin(c, self.smem)
        vectors = [x.at[self.phase] for x in gmem.vectors]
        self.vectors = Vectors(c, vectors, self.smem, me, self.wg)
        zero = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)
        sums = (zero,) * (f.num_sums * c.chunks)
        if c.ahead:
            self.fold(jnp.int32(0))

            def step(i, sums):
                self.fold(i + 1)
                return self.finish(i, sums)

            sums = lax.fori_loop(0, self.count - 1, step, sums)
            sums = self.finish(self.count - 1, sums)
        else:

            def step(i, sums):
                return self.finish(i, sums, self.fold(i))

            sums = lax.fori_loop(0, self.count, step, sums)
        for k, value in enumerate(sums):
            chunk, j = divmod(k, f.num_sums)
            cut = not self.k.whole(chunk)
            self.write(self.k.sums, value, gmem.sums[j], (self.first, chunk), cut=cut)

    def fetch(self, i, k) -> None:
        """Asks for a chunk, the k-th from the i-th row on."""
        c = self.c
        slot = lax.rem(i * c.chunks + k, c.slots)
        later = k // c.chunks if isinstance(k, int) else lax.div(k, c.chunks)
        chunk = k - later * c.chunks
        self.copies.load(
            self.gmem.inputs, [x.at[slot] for x in self.slots], self.barrier(slot),
            row=self.row(i + later), column=self.own.column(chunk), wanted=i + later < self.count,
        )  # fmt: skip

    def row(self, i):
        """The i-th row, or the first warp's."""
        return self.order.row(self.first + i * self.stride)

    def barrier(self, slot):
        if self.c.interpretable:
            return self.smem.full.at[self.wg * self.c.slots + slot]
        return self.smem.full.at[self.wg, pl.ds(BARRIER_WORDS * slot, BARRIER_WORDS)]

    def input_of(self, i, chunk):
        """Loads inputs of a chunk of the i-th row."""
        slot = self.slot(i, chunk)

        def load(j):
            x = self.read(i, self.slots[j].at[slot])
            if x.dtype == jnp.bfloat16 and not self.c.interpretable:
                return widened(x, vector=self.c.vector)
            return x.astype(jnp.float32)

        return load

    def read(self, i, slot):
        """A chunk [A, M] of the i-th row."""
        if isinstance(self.copies, InterpretedCopies):
            return self.copies.read(slot, row=self.row(i), shape=self.shape)
        if self.k.unit < self.copies.word:
            return read(self.copies, slot, row=self.row(i), shape=self.shape, vector=self.c.vector)
        return plgpu.load(slot.reshape(self.shape), layout=self.layout, optimized=False)

    @property
    def branches(self) -> bool:
        """Whether warpgroups that have nothing of a neighbor's in a chunk do not look for it."""
        c = self.c
        return c.cluster > 1 and not (self.f.num_sums or c.most_turns > 1 or c.interpretable)

    def over_chunks(self, step, carry):
        """Chunks one after another, in loops where nothing of a chunk is in registers."""
        chunks, first = range(self.c.chunks), 0
        if not self.static:
            whole = [k for k in chunks if self.k.whole(k)]
            for chunk in chunks[: whole[0] if whole else None]:
                carry, first = step(chunk, carry, cut=True), chunk + 1
            if len(whole) > 2:
                if not first:
                    carry, first = step(0, carry, cut=False), 1
                inner = functools.partial(step, cut=False)
                carry, first = lax.fori_loop(first, whole[-1] + 1, inner, carry), whole[-1] + 1
        for chunk in chunks[first:]:
            carry = step(chunk, carry, cut=not self.k.whole(chunk))
        return carry

    def fold(self, i):
        """The numbers of the i-th row, sent to those who share it, or of each warp's row."""
        f, c = self.f, self.c

        def look(chunk, *, cut):
            turn = lax.div(i * c.chunks + chunk, c.slots)
            self.copies.wait(self.barrier(self.slot(i, chunk)), lax.rem(turn, 2))
            if cut and isinstance(self.copies, FlatCopies) and self.copies.odd_end:
                self.complete(self.copies, i, chunk)
            load, vector = self.input_of(i, chunk), self.vectors.of(chunk)
            columns: Count = c.tile
            fold = functools.partial(self.own.fold, load, vector, i, chunk)
            fold_whole = functools.partial(fold, columns, cut=False)
            if not cut:
                return columns, fold_whole()
            if f.uneven is not None:
                columns = self.own.of_warps(i, chunk, c.tile)
            fold_cut = functools.partial(fold, columns, cut=True)
            if not self.branches:
                return columns, fold_cut()
            return columns, lax.cond(self.own.is_whole(i, chunk), fold_whole, fold_cut)

        def step(chunk, found, *, cut):
            columns, more = look(chunk, cut=cut)
            if found is None:
                if not self.static:  # loops carry arrays
                    columns = to_parts(jnp.asarray(columns, jnp.float32), self.layout)
                return columns, more
            seen, numbers = found
            return seen + columns, f.merge(seen, columns, numbers, more)

        _, numbers = self.over_chunks(step, None)
        return self.send(i, numbers)

    def complete(self, copies: FlatCopies, i, chunk) -> None:
        """Loads what is behind the last word of the arrays, where that is the i-th row's end."""
        row, slot = self.row(i), self.slot(i, chunk)
        last = row + (WARPS - 1) * self.order.period * self.c.by_warps

        @pl.when(last >= self.order.num_rows - 1)
        def _():
            slots = [x.at[slot] for x in self.slots]
            copies.complete(self.gmem.inputs, slots, row=row, column=self.own.column(chunk))

    def slot(self, i, chunk):
        return lax.rem(i * self.c.chunks + chunk, self.c.slots)

    def send(self, i, numbers):
        if self.c.by_warps:
            return numbers
        send(self.c, self.smem, self.me, i, numbers, self.team)
        return None

    def receive(self, i, numbers):
        if self.c.by_warps:
            return numbers
        return receive(self.c, self.smem, i, self.f.num_numbers, self.team)

    def finish(self, i, sums, numbers=None):
        """Writes the i-th row's results; the sums with its own added."""
        f, c = self.f, self.c
        found = f.join(self.own.parts(i), *self.receive(i, numbers))
        totals = [self.own.to_columns(x) for x in found]

        def step(chunk, sums, *, cut):
            results, addends = f.finish(self.input_of(i, chunk), self.vectors.of(chunk), totals)
            if addends:
                first = chunk * f.num_sums
                mine = sums[first : first + f.num_sums]
                new = tuple(self.add(s, a) for s, a in zip(mine, addends, strict=True))
                sums = (*sums[:first], *new, *sums[first + f.num_sums :])
            for out, result in zip(self.gmem.results, results, strict=True):
                result = result.astype(self.k.dtype)
                write = functools.partial(
                    self.write, self.copies, result, out, (self.row(i), chunk)
                )
                if not cut or not self.branches or self.gmem.vectors:
                    write(cut=cut)
                    continue
                whole = self.own.is_whole(i, chunk)
                pl.when(whole)(functools.partial(write, cut=False))
                pl.when(jnp.logical_not(whole))(functools.partial(write, cut=True))
            plgpu.commit_smem()  # all warps have read the slot
            self.fetch(i, chunk + c.slots)
            return sums

        return self.over_chunks(step, sums)

    def add(self, total, addend):
        """A sum over rows with one more."""
        if isinstance(self.copies, InterpretedCopies):
            return total + addend
        return added(total, addend, vector=self.c.vector)

    def write(self, copies, x, out, place, *, cut: bool) -> None:
        """Stores a row's chunk from registers."""
        (row, chunk), vector = place, self.c.vector
        column = self.own.column(chunk)
        if isinstance(copies, FlatCopies):
            sure = self.k.sure(chunk) if cut else None
            write(
                copies, x, out, row=row, column=column, vector=vector, sure=sure,
                branches=self.f.num_sums > 0,
            )  # fmt: skip
        else:
            copies.write(x, out, row=row, column=column)
