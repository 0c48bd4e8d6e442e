"""The row kernel for softmaxes, norms and their gradients: each row is read once, written once.

TMA copies chunks of a row into slots of shared memory (``copies``). A warpgroup reduces each of its
chunks to a few numbers, which all warpgroups of the row exchange (``exchange``). A second pass over
the chunks writes the results from registers (``registers``). A cluster computes one row, or a few,
so that vectors such as a norm's scale are read once for them. For sums over rows, which stay in
registers, there are only as many clusters as run at once. Several small blocks share an SM: while
one waits or computes, others load and store, so the rate depends on how many fit (``choice``). A
warp takes short rows whole, several at a time, without an exchange.

Which columns a thread has depends on the row's shift (``copies``), which repeats every 1, 2, 4 or 8
rows. The rows of a cluster are multiples of this period apart. So a thread has the same columns of
all of them, for vectors and sums, and sums are stored like one more row.

Dims: R row, C column, A part of a row in a warpgroup or whole row, M column of a chunk, P part.
"""

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.lanes import sums_over_lanes
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import LANES, WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .choice import config_for
from .config import (
    BARRIER_WORDS,
    REDUCTION_BYTES,
    RowConfig,
    buffers,
    lane_layout,
    tile_layout,
)
from .copies import Copies, InterpretedCopies
from .exchange import begin, receive, send
from .formula import Formula, Load, Parts, RowCall, Tile, to_columns
from .registers import Cut, added, masked, widened, write


def apply_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    vectors_C: Sequence[jax.Array] = (),
    config: RowConfig | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Applies a formula, such as a softmax, to every row by the kernel.

    Args:
        inputs_RC: arrays of one shape and one of ``dispatch.DTYPES``, then masks in int8.
        vectors_C: fp32 vectors that all rows share, such as a scale.
        config: tile sizes; None takes those of ``choice.config_for``.

    Returns:
        Results, of the inputs' shape and dtype, then totals, fp32 [R]; and partial sums over rows,
        fp32 [N, C].

    Raises:
        UnsupportedError: the kernel does not take such rows.
    """
    call = RowCall.of(formula, inputs_RC, vectors_C)
    num_rows = inputs_RC[0].shape[0]
    plan = _Plan(f=formula, c=config or config_for(num_rows, call), call=call, num_rows=num_rows)
    c, copies, sum_copies, total_copies = plan.c, plan.copies, plan.sum_copies, plan.total_copies
    inputs = list(inputs_RC)
    if c.interpretable:
        inputs = [jnp.pad(x.reshape(-1), (0, c.columns)) for x in inputs_RC]
    found = launch(
        lambda gmem, smem: _Rows(plan, gmem, smem).run(),
        name=formula.name,
        operands={"inputs": inputs, "vectors": [plan.shifted(v) for v in vectors_C]},
        results={
            name: [jax.ShapeDtypeStruct((each.num_rows * each.width,), dtype)] * count
            for name, each, dtype, count in (
                ("results", copies, call.dtype, formula.num_results),
                ("totals", total_copies, jnp.float32, formula.num_totals),
                ("sums", sum_copies, jnp.float32, formula.num_sums),
            )
        },
        scratch=buffers(c, call),
        grid=(plan.num_workers,),
        grid_names=("worker",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=c.group,
        params=dict(
            # Exponentials and roots to 2**-22, one instruction each, are enough for 16 bits alone.
            approx_math=call.dtype.itemsize == 2,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=REDUCTION_BYTES,
        ),
    )
    results, sums = (
        tuple(each.whole(x).reshape(-1, call.columns) for x in found[name])
        for name, each in (("results", copies), ("sums", sum_copies))
    )
    totals = (x.reshape(num_rows, -1)[:, 0] for x in found["totals"])
    return (*results, *totals), sums


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A formula, its tiles and the rows of one call.

    A unit is a row, or the whole rows that a warpgroup has at a time.
    """

    f: Formula
    c: RowConfig
    call: RowCall
    num_rows: int

    def __post_init__(self):
        c = self.c
        shift = self.call.word - math.gcd(self.unit, self.call.word)
        assert c.columns >= self.unit + shift, (self.unit, c)
        assert c.slots >= c.chunks * (1 + c.ahead), c
        assert self.num_rows % self.batch == 0, (self.num_rows, c)

    @property
    def batch(self) -> int:
        """Number of rows in a unit, which a cluster computes at a time."""
        return self.c.shape[0] if self.c.rows_per_warp else 1

    @property
    def unit(self) -> int:
        """Number of elements in a unit."""
        return self.batch * self.call.columns

    @property
    def num_units(self) -> int:
        """Number of units that all rows make."""
        return self.num_rows // self.batch

    @property
    def period(self) -> int:
        """Number of units after which rows' shifts repeat; 1 where shifts do not matter."""
        matters = self.call.num_vectors + self.call.num_sums > 0
        return self.call.word // math.gcd(self.unit, self.call.word) if matters else 1

    @property
    def num_workers(self) -> int:
        """Number of clusters; a multiple of the period unless each has at most one unit."""
        units, period, turns = self.num_units, self.period, self.c.turns
        most = -(-units // turns) if turns else min(units, self.c.workers)
        if most == units:
            return units
        periods = -(-most // period) if turns else max(1, most // period)
        return min(units, periods * period)

    @property
    def copies(self) -> Copies:
        """The copies that load inputs, and that locate results in memory."""
        kind = InterpretedCopies if self.c.interpretable else Copies
        return kind(
            num_rows=self.num_units, columns=self.unit, piece=self.c.piece, word=self.call.word,
            itemsizes=tuple(dtype.itemsize for dtype in self.call.dtypes),
            width=self.c.columns if self.c.interpretable else self.unit,
        )  # fmt: skip

    @property
    def sum_copies(self) -> Copies:
        """Copies that locate sums: one row per cluster, or four if warps have whole rows."""
        found = dataclasses.replace(self.copies, num_rows=self.num_workers)
        if not self.c.rows_per_warp:
            return found
        size = WARPS * self.call.columns
        return dataclasses.replace(found, columns=size, piece=size, width=size)

    @property
    def total_copies(self) -> Copies:
        """Copies that locate totals: in words, one register of each thread for each of its rows."""
        size = self.c.shape[0] * LANES * self.c.vector
        return dataclasses.replace(self.copies, columns=size, piece=size, width=size)

    def shifted(self, x_C: jax.Array) -> jax.Array:
        """Lays out a vector in chunks, once per shift of a period's units."""
        c = self.c
        if c.rows_per_warp:
            return x_C.reshape(1, 1, 1, 1, c.tile)
        shifts = [row * self.unit % self.call.word for row in range(self.period)]
        behind = c.columns - self.unit
        shape = c.chunks, c.cluster, c.group, WARPS, c.tile
        return jnp.stack([jnp.pad(x_C, (s, behind - s)).reshape(shape) for s in shifts])

    def cut(self, chunk: int) -> Cut | None:
        """Number of elements that a chunk may lack in any warpgroup; None if it lacks none."""
        c, members = self.c, self.c.cluster * self.c.group
        last = (chunk + 1) * members - 1  # the piece that is cut off first
        sure = max(0, min(c.piece, self.unit - last * c.piece))
        begins = self.unit % self.call.word > 0 and chunk == 0
        return Cut(sure=sure, begins=begins) if begins or sure < c.piece else None


class _Rows:
    """Work of a warpgroup on its cluster's rows, by their number i."""

    def __init__(self, plan: _Plan, gmem, smem):
        self.plan, self.f, self.c, self.copies = plan, plan.f, plan.c, plan.copies
        me = types.SimpleNamespace(wg=lax.axis_index("wg"), rank=lax.axis_index("cluster"))
        self.gmem, self.smem, self.me = gmem, smem, me
        self.layout = tile_layout(self.c.vector)
        whole = self.c.rows_per_warp > 0
        if whole or self.c.interpretable:
            self.sums = functools.partial(_sums, axis=1)
            of_parts = functools.partial(_sums, axis=None if whole else -1)
        else:
            sums = functools.partial(sums_over_lanes, result=self.layout.reduce(1))
            self.sums = functools.partial(sums, layout=self.layout, width=LANES)
            num_parts = self.c.num_parts
            of_parts = functools.partial(
                sums, layout=lane_layout(num_parts), width=min(num_parts, LANES)
            )
        self.parts = Parts(whole=whole, sums=of_parts)
        self.worker = lax.axis_index("worker")
        self.member = me.rank * self.c.group + me.wg
        self.slots = [getattr(smem, f"input{j}").at[me.wg] for j in range(len(gmem.inputs))]
        self.stride = plan.num_workers
        self.count = lax.div(plan.num_units - self.worker + self.stride - 1, self.stride)
        self.single = plan.num_workers == plan.num_units
        # What is in registers, vectors or sums, has no index: then chunks are written out.
        held = len(gmem.vectors) > 0 and self.c.in_memory < self.c.chunks
        self.static = self.f.num_sums > 0 or held or self.c.chunks <= 2

    def run(self) -> None:
        """Computes all rows of the cluster."""
        c, f = self.c, self.f
        self.copies.begin(self.smem.full.at[self.me.wg], c.slots)
        for k in range(c.chunks if self.single else c.slots):
            self.fetch(jnp.int32(0), k)
        if not self.parts.whole:
            begin(c, self.smem)
        self.vectors = _Vectors(self.plan, self.gmem, self.smem, self.me)
        zero = plgpu.layout_cast(jnp.zeros((WARPS, c.tile), jnp.float32), self.layout)
        sums = (zero,) * (f.num_sums * c.chunks)
        if self.single:
            sums = self.finish(jnp.int32(0), sums, self.fold(jnp.int32(0), self.samples(0)))
        else:
            sums = self.ahead(sums) if c.ahead else self.in_turn(sums)
        for k, value in enumerate(sums):
            chunk, j = divmod(k, f.num_sums)
            cut = self.plan.cut(chunk)
            self.write(self.plan.sum_copies, value, self.gmem.sums[j], self.worker, chunk, cut)

    def in_turn(self, sums):
        """Computes row after row. Samples are loaded one row early, to hide their latency."""

        def step(i, carry):
            sums, samples = carry
            folded = self.fold(i, samples)
            later = self.samples(i + 1)
            return self.finish(i, sums, folded), later

        return lax.fori_loop(0, self.count, step, (sums, self.samples(0)))[0]

    def ahead(self, sums):
        """Folds each next row before the current one is finished, to overlap their exchanges."""

        def step(i, carry):
            sums, folded, samples = carry
            after = self.fold(i + 1, samples)
            later = self.samples(i + 2)
            return self.finish(i, sums, folded), after, later

        carry = sums, self.fold(jnp.int32(0), self.samples(0)), self.samples(1)
        sums, folded, _ = lax.fori_loop(0, self.count - 1, step, carry)
        return self.finish(self.count - 1, sums, folded)

    def row(self, i):
        """Returns the index of the first row of the cluster's i-th unit."""
        return self.worker + i * self.stride

    def samples(self, i):
        """Loads the first columns of the i-th row, one per lane, if a pivot is made of them."""
        if self.f.pivot is None or self.parts.whole:
            return ()
        columns, row = self.plan.call.columns, jnp.minimum(self.row(i), self.plan.num_units - 1)

        def load(x):
            if self.c.interpretable:
                return x[pl.ds(row * columns, LANES)]
            first = x.at[row, pl.ds(0, LANES)]
            return plgpu.load(first, layout=lane_layout(LANES), optimized=False)

        return tuple(map(load, self.gmem.inputs[: self.f.num_pivoted]))

    def pivot(self, samples):
        """Returns the mean of the samples, which is near the row's values; None without samples."""
        if self.f.pivot is None or not samples:
            return None
        x = self.f.pivot(lambda j: samples[j].astype(jnp.float32))
        return jnp.sum(x) * (1.0 / LANES)

    def fetch(self, i, k) -> None:
        """Starts the copy of a chunk, the k-th counted from the start of the i-th row."""
        c = self.c
        later = k // c.chunks if isinstance(k, int) else lax.div(k, c.chunks)
        self.copies.load(
            self.gmem.inputs,
            [x.at[self.slot(i, k)] for x in self.slots],
            self.barrier(self.slot(i, k)),
            row=self.row(i + later),
            column=self.column(k - later * c.chunks),
            wanted=i + later < self.count,
        )

    def slot(self, i, chunk):
        """Returns the index of the shared-memory slot that holds a chunk of the i-th row."""
        return lax.rem(i * self.c.chunks + chunk, self.c.slots)

    def column(self, chunk):
        """Returns a chunk's first column; warpgroups alternate, so that few lack elements."""
        return (chunk * self.c.cluster * self.c.group + self.member) * self.c.piece

    def barrier(self, slot):
        if self.c.interpretable:
            return self.smem.full.at[self.me.wg * self.c.slots + slot]
        return self.smem.full.at[self.me.wg, pl.ds(BARRIER_WORDS * slot, BARRIER_WORDS)]

    def input_of(self, i, chunk) -> Load:
        """Returns a function that loads inputs of a chunk of the i-th row."""

        def load(j):
            slot = self.slots[j].at[self.slot(i, chunk)]
            if self.c.interpretable:
                return slot[...].reshape(self.c.shape).astype(jnp.float32)
            x = plgpu.load(slot.reshape(self.c.shape), layout=self.layout, optimized=False)
            if x.dtype == jnp.bfloat16 and self.c.vector > 1:
                return widened(x, vector=self.c.vector)
            return x.astype(jnp.float32)

        return load

    def own(self, i, chunk, cut: Cut | None) -> Callable[..., jax.Array]:
        """Replaces the neighbor rows' elements in a chunk of the i-th row."""
        row, column = self.row(i), self.column(chunk)

        def own(x, fill):
            if cut is None:
                return x
            if isinstance(self.copies, InterpretedCopies):
                warp, at = (
                    plgpu.broadcasted_iota(jnp.int32, x.shape, d, layout=self.layout)
                    for d in (0, 1)
                )
                begin = lax.rem(row * self.plan.unit, self.plan.call.word) - column
                at = warp * self.c.tile + at
                return jnp.where((at >= begin) & (at < begin + self.plan.unit), x, fill)
            return masked(self.copies, self.c, x, fill, row=row, column=column, cut=cut)

        return own

    def over_chunks(self, step, carry):
        """Applies ``step`` to each chunk in turn; to full ones in a loop, if registers allow."""
        chunks = range(self.c.chunks)
        whole = [k for k in chunks if self.plan.cut(k) is None]
        if self.static or len(whole) <= 2:
            for chunk in chunks:
                carry = step(chunk, carry, cut=self.plan.cut(chunk))
            return carry
        first, end = max(whole[0], 1), whole[-1] + 1  # the first of all makes the carry
        carry = step(0, carry, cut=self.plan.cut(0))
        carry = lax.fori_loop(first, end, functools.partial(step, cut=None), carry)
        for chunk in chunks[end:]:
            carry = step(chunk, carry, cut=self.plan.cut(chunk))
        return carry

    def fold(self, i, samples):
        """Folds the i-th row to its numbers and sends them to the warpgroups that share the row.

        Returns:
            The pivot, and the numbers if the row is whole.
        """
        f, c, pivot = self.f, self.c, self.pivot(samples)

        def step(chunk, found, *, cut):
            turn = lax.div(i * c.chunks + chunk, c.slots)
            self.copies.wait(self.barrier(self.slot(i, chunk)), lax.rem(turn, 2))
            load, near = self.input_of(i, chunk), pivot
            if f.pivot is not None and self.parts.whole:
                near = jnp.sum(f.pivot(load), axis=1) * (1.0 / c.tile)
            tile = Tile(
                own=self.own(i, chunk, cut),
                sums=self.sums,
                pivot=None if near is None else to_columns(near, c.shape),
            )
            numbers = f.fold(load, self.vectors.of(chunk), tile)
            return near, numbers if found is None else f.merge(found[1], numbers)

        pivot, numbers = self.over_chunks(step, None)
        if self.parts.whole:
            return pivot, numbers
        send(c, self.smem, self.me, i, numbers)
        return pivot, ()

    def finish(self, i, sums, folded):
        """Writes the results of the i-th row, already folded; returns sums that include its own."""
        f, c = self.f, self.c
        pivot, numbers = folded
        if not self.parts.whole:
            numbers = receive(c, self.smem, i, f.num_numbers)
        joined = f.join(self.parts, pivot, *numbers)
        for out, total in zip(self.gmem.totals, joined[: f.num_totals], strict=True):
            self.write_total(total, out, self.row(i))
        totals = [to_columns(x, c.shape) for x in joined]

        def step(chunk, sums, *, cut):
            results, addends = f.finish(self.input_of(i, chunk), self.vectors.of(chunk), totals)
            if addends:
                first = chunk * f.num_sums
                mine = sums[first : first + f.num_sums]
                new = tuple(self.add(s, a) for s, a in zip(mine, addends, strict=True))
                sums = (*sums[:first], *new, *sums[first + f.num_sums :])
            for out, result in zip(self.gmem.results, results, strict=True):
                rounded = result.astype(self.plan.call.dtype)
                self.write(self.copies, rounded, out, self.row(i), chunk, cut)
            if not self.single:
                plgpu.commit_smem()  # all warps have read the slot
                self.fetch(i, chunk + c.slots)
            return sums

        return self.over_chunks(step, sums)

    def add(self, total, addend):
        """Adds one more addend to a sum over rows, separately for each warp's rows."""
        parts = range(0, addend.shape[0], WARPS)
        each = [lax.slice(addend, (k, 0), (k + WARPS, addend.shape[1])) for k in parts]
        addend = functools.reduce(jnp.add, each)
        return (
            total + addend if self.c.interpretable else added(total, addend, vector=self.c.vector)
        )

    def write_total(self, total, out, row) -> None:
        """Stores a number of each row by the first warpgroup that computes it."""

        @pl.when(self.member == 0)
        def _():
            wide = to_columns(total, (self.c.shape[0], LANES * self.c.vector))
            wide = plgpu.layout_cast(wide, self.layout)
            self.write(self.plan.total_copies, wide, out, row, 0, None)

    def write(self, copies, x, out, row, chunk, cut: Cut | None) -> None:
        """Stores one chunk of a row from registers to global memory."""
        column = self.column(chunk)
        if isinstance(copies, InterpretedCopies):
            copies.write(x, out, row=row, column=column)
        else:
            write(copies, self.c, x, out, row=row, column=column, cut=cut)


class _Vectors:
    """Vectors of the first chunks in registers, of the others in shared memory."""

    def __init__(self, plan: _Plan, gmem, smem, me):
        c, self.c, self.smem, self.me = plan.c, plan.c, smem, me
        phase = lax.rem(lax.axis_index("worker"), plan.period)
        self.num_held = c.chunks - c.in_memory
        self.held = {}
        for j, k in itertools.product(range(len(gmem.vectors)), range(c.chunks)):
            found = self._load(gmem.vectors[j].at[phase, k, me.rank, me.wg])
            if k < self.num_held:
                self.held[j, k] = found
            else:  # a thread reads what it has written itself
                place = getattr(smem, f"vector{j}").at[me.wg, k - self.num_held]
                write_registers(found, place)

    def of(self, chunk: int | jax.Array) -> Load:
        """Loads the vectors' columns of a chunk, [A, M] each."""
        if isinstance(chunk, int) and chunk < self.num_held:
            return lambda j: self.held[j, chunk]

        def load(j):
            ref = getattr(self.smem, f"vector{j}").at[self.me.wg, chunk - self.num_held]
            return self._load(ref)

        return load

    def _load(self, ref) -> jax.Array:
        layout = tile_layout(self.c.vector)
        if not self.c.rows_per_warp:
            return plgpu.load(ref, layout=layout, optimized=False)
        x_M = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x_M, self.c.shape, [1])


def _sums(*xs: jax.Array, axis: int | None) -> tuple[jax.Array, ...]:
    """The sum of each over a dim, if any."""
    return xs if axis is None else tuple(jnp.sum(x, axis=axis) for x in xs)
