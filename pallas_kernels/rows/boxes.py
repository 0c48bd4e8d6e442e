"""Rows of any length on a Hopper GPU: read once by the copy engine, kept aligned, written by it.

As ``wide``, but that a row may end within a chunk and begin at any element (``flat``): what shared
memory holds behind its end belongs to a neighbor and does not count. A chunk is folded, the numbers
of all chunks of a row are exchanged, and a second turn over the chunks writes each result over its
input, which the engine takes away; its slot is filled again one chunk later. A row belongs to the
warpgroups of one or more blocks, a shorter one to one of several teams of a block, and one of one
or two thousand columns to a warp, which needs no exchange. Columns lie aligned, so that scales and
sums over rows belong to threads as in the even forms.

Dims: R row, C column, A part of a row in a warpgroup or a warp's row, M column of a tile, P part.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .config import Boxes, tile_layout
from .exchange import receive, send
from .flat import FlatCopies
from .formula import Formula, Parts, RowCall, compiler_params, to_columns
from .interpreted import InterpretedCopies
from .smem import BARRIER_WORDS, REDUCTION_BYTES, boxes_scratch


def box_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Boxes,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; arguments as in ``apply.apply_rows``."""
    formula = formula.apart or formula
    c, (num_rows, columns), dtype = config, inputs_RC[0].shape, inputs_RC[0].dtype
    assert formula.neutral is not None, "columns that must not count have no value in this formula"
    assert formula.num_results <= len(inputs_RC), "results are written over inputs"
    assert formula.first_dtype is None
    assert formula.num_row_results == 0
    assert not (formula.num_sums and c.by_warps), "sums of four rows"
    assert columns <= c.columns, (columns, c)
    assert c.slots > c.chunks * (2 if c.ahead else 1), f"{c} keeps a row and one chunk that leaves"
    assert formula.again is None or not c.ahead
    kernel = _Boxes(f=formula, c=c, num_rows=num_rows, columns=columns, dtype=dtype)
    padding = c.columns - columns
    flat = [x.reshape(-1) for x in inputs_RC]
    if c.interpretable:
        flat = [jnp.pad(x, (0, c.columns)) for x in flat]
    partial = (kernel.num_workers * c.teams, *kernel.row_shape)
    found = launch(
        kernel.run,
        operands={
            "inputs": flat,
            "vectors": [jnp.pad(v, (0, padding)).reshape(kernel.row_shape) for v in vectors_C],
        },
        results={
            "results": [jax.ShapeDtypeStruct((num_rows * columns,), dtype)] * formula.num_results,
            "sums": [jax.ShapeDtypeStruct(partial, jnp.float32)] * formula.num_sums,
        },
        scratch=boxes_scratch(c, RowCall.of(formula, inputs_RC, vectors_C)),
        grid=(kernel.num_workers,),
        grid_names=("worker",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=c.warpgroups,
        compiler_params=compiler_params(dtype, REDUCTION_BYTES),
    )
    results = tuple(x.reshape(num_rows, columns) for x in found["results"])
    return results, tuple(x.reshape(partial[0], -1)[:, :columns] for x in found["sums"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Boxes:
    """The kernel of one call; methods are its phases, written once per trace."""

    f: Formula
    c: Boxes
    num_rows: int
    columns: int
    dtype: jnp.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of what belongs to the columns of a row, padded."""
        c = self.c
        if c.by_warps:
            return 1, 1, c.chunks, c.tiles, c.tile
        return c.cluster, c.group, c.chunks, c.tiles, WARPS, c.tile

    @property
    def num_units(self) -> int:
        """What a team works on at a time: a row, or one for each warp."""
        return -(-self.num_rows // WARPS) if self.c.by_warps else self.num_rows

    @property
    def num_workers(self) -> int:
        return min(self.c.num_clusters, -(-self.num_units // self.c.teams))

    @property
    def copies(self) -> FlatCopies | InterpretedCopies:
        """What copies pieces."""
        kind = InterpretedCopies if self.c.interpretable else FlatCopies
        return kind(
            num_rows=self.num_rows, columns=self.columns, piece=self.c.piece,
            itemsize=self.dtype.itemsize, by_warps=self.c.by_warps,
        )  # fmt: skip

    def run(self, gmem, smem) -> None:
        """One warpgroup."""
        wg = lax.axis_index("wg")
        team, member = lax.div(wg, self.c.members), lax.rem(wg, self.c.members)
        me = types.SimpleNamespace(wg=member, rank=lax.axis_index("cluster"))
        # Teams of other blocks first: few rows are spread over all multiprocessors.
        first = team * self.num_workers + lax.axis_index("worker")
        _Team(self, gmem, smem, me, (wg, team, first)).run()


class _Team:
    """What a warpgroup does with its team's rows."""

    def __init__(self, kernel: _Boxes, gmem, smem, me, places):
        self.k, self.f, self.c = kernel, kernel.f, kernel.c
        self.gmem, self.smem, self.me = gmem, smem, me
        self.wg, self.team, self.first = places
        self.slots = [getattr(smem, f"input{j}").at[self.wg] for j in range(len(gmem.inputs))]
        self.copies = kernel.copies
        self.layout = tile_layout(self.c.vector)
        self.shape = (WARPS, self.c.tile)
        self.parts = Parts(whole=self.c.by_warps)
        self.stride = kernel.num_workers * self.c.teams
        left = jnp.maximum(kernel.num_units - self.first + self.stride - 1, 0)
        self.count = lax.div(left, self.stride)
        self.held: dict[tuple[int, int], jax.Array] = {}

    def run(self) -> None:
        """All rows of the team."""
        c, f, gmem, me = self.c, self.f, self.gmem, self.me
        if not c.interpretable:
            self.copies.begin(self.smem.full.at[self.wg], c.slots)
        for q in range(c.slots - 1):
            self.fetch(jnp.int32(0), q)
        self.hold_vectors()
        zero = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)
        sums = (zero,) * (f.num_sums * c.chunks * c.tiles)
        if c.ahead:
            self.fold(jnp.int32(0))

            def step(i, sums):
                self.fold(i + 1)
                return self.finish(i, sums)

            sums = lax.fori_loop(0, self.count - 1, step, sums)
            sums = self.finish(self.count - 1, sums)
        else:
            sums = lax.fori_loop(0, self.count, lambda i, sums: self.finish(i, sums, self.fold(i)), sums)
        for k, value in enumerate(sums):
            tile, j = divmod(k, f.num_sums)
            place = (self.first, me.rank, me.wg, *divmod(tile, c.tiles))
            write_registers(value, gmem.sums[j].at[place])
        plgpu.wait_smem_to_gmem(0)

    def fetch(self, i, k: int) -> None:
        """Asks for a chunk, the k-th from the i-th row on."""
        c = self.c
        later, chunk = divmod(k, c.chunks)
        slot = lax.rem(i * c.chunks + k, c.slots)
        self.copies.load(
            self.gmem.inputs, [x.at[slot] for x in self.slots], self.barrier(slot),
            row=self.row(i + later), columns=self.begin(chunk), wanted=i + later < self.count,
        )  # fmt: skip

    def row(self, i):
        """The i-th row, or the first warp's."""
        return (self.first + i * self.stride) * (WARPS if self.c.by_warps else 1)

    def begin(self, chunk: int):
        """The columns at which the pieces of a chunk begin."""
        c = self.c
        if c.by_warps:
            return tuple((chunk * c.tiles + tile) * c.tile for tile in range(c.tiles))
        if c.cluster * c.group == 1:
            return (chunk * c.piece,)
        return self.share() + chunk * c.piece

    def share(self):
        """The column at which this warpgroup's share of a row begins."""
        c = self.c
        if c.cluster * c.members == 1:
            return 0
        return (self.me.rank * c.members + self.me.wg) * (c.chunks * c.piece)

    def barrier(self, slot):
        if self.c.interpretable:
            return self.smem.full.at[self.wg * self.c.slots + slot]
        return self.smem.full.at[self.wg, pl.ds(BARRIER_WORDS * slot, BARRIER_WORDS)]

    def input_of(self, q, chunk: int, tile: int, fill: Sequence[Any] | None = None):
        """Loads inputs of a tile of the q-th chunk; what is behind the row's end becomes fill."""
        c = self.c
        slot = lax.rem(q, c.slots)
        width = c.tile if c.by_warps else WARPS * c.tile
        before = (chunk * c.tiles + tile) * width
        longest = self.k.columns - before
        if not c.by_warps:
            longest -= (c.cluster * c.group - 1) * c.chunks * c.piece
        end = self.k.columns - before - (0 if c.by_warps else self.share())

        def load(j):
            x = self.read(self.tile(j, slot, tile)).astype(jnp.float32)
            if fill is None or longest >= width:
                return x
            return jnp.where(self.column_of_tile() < end, x, fill[j])

        return load

    def column_of_tile(self):
        """[A, M]: the column of the row, counted from its tile's first."""
        warp, column = (
            plgpu.broadcasted_iota(jnp.int32, self.shape, dim, layout=self.layout) for dim in (0, 1)
        )
        return column if self.c.by_warps else warp * self.c.tile + column

    def tile(self, j: int, slot, tile: int):
        """Where a tile of the j-th input lies."""
        size = WARPS * self.c.tile
        return self.slots[j].at[slot, pl.ds(tile * size, size)]

    def read(self, place):
        if self.c.interpretable:
            return place[...].reshape(self.shape)
        return plgpu.load(place.reshape(self.shape), layout=self.layout, optimized=False)

    def write(self, value, place):
        if self.c.interpretable:
            place[...] = value.reshape(-1)
        else:
            write_registers(value, place.reshape(self.shape))

    def fold(self, i):
        """The numbers of the i-th row, sent to those who share it, or of each warp's row."""
        f, c = self.f, self.c
        numbers = None
        for chunk in range(c.chunks):
            q = i * c.chunks + chunk
            slot = lax.rem(q, c.slots)
            self.copies.wait(self.barrier(slot), lax.rem(lax.div(q, c.slots), 2))
            for tile in range(c.tiles):
                load = self.input_of(q, chunk, tile, f.neutral)
                more = f.fold(load, self.vector_of(chunk, tile))
                seen = chunk * c.tiles + tile
                numbers = f.merge(seen, c.tile, numbers, more) if numbers else more
        assert numbers is not None
        return self.send(i * f.num_turns, numbers)

    def send(self, i, numbers):
        if self.c.by_warps:
            return numbers
        send(self.c, self.smem, self.me, i, numbers, self.team)
        return None

    def receive(self, i, num_numbers: int, numbers):
        if self.c.by_warps:
            return numbers
        return receive(self.c, self.smem, i, num_numbers, self.team)

    def fold_again(self, again, i, totals):
        """More totals of the i-th row, that need the first."""
        c, numbers = self.c, None
        neutral = self.f.neutral
        assert neutral is not None
        # The first is the mean, from which the mean is apart by nothing.
        fill = (totals[0], *neutral[1:])
        for chunk, tile in itertools.product(range(c.chunks), range(c.tiles)):
            load = self.input_of(i * c.chunks + chunk, chunk, tile, fill)
            more = again.fold(load, self.vector_of(chunk, tile), totals)
            numbers = again.merge(numbers, more) if numbers else more
        turn = i * self.f.num_turns + 1
        found = self.receive(turn, again.num_numbers, self.send(turn, numbers))
        return again.join(self.parts, *found)

    def finish(self, i, sums, numbers=None):
        """Writes the i-th row's results; the sums with its own added."""
        f, c, gmem = self.f, self.c, self.gmem
        found = self.receive(i * f.num_turns, f.num_numbers, numbers)
        totals = [to_columns(x, self.shape) for x in f.join(self.parts, *found)]
        if f.again is not None:
            more = self.fold_again(f.again, i, totals)
            totals += [to_columns(x, self.shape) for x in more]
        kept = []
        for chunk in range(c.chunks):
            q = i * c.chunks + chunk
            slot = lax.rem(q, c.slots)
            for tile in range(c.tiles):
                load = self.input_of(q, chunk, tile)
                results, addends = f.finish(load, self.vector_of(chunk, tile), totals)
                mine = sums[len(kept) : len(kept) + f.num_sums]
                kept += [s + a for s, a in zip(mine, addends, strict=True)]
                for j, result in enumerate(results):
                    self.write(result.astype(self.k.dtype), self.tile(j, slot, tile))
            plgpu.commit_smem()
            slots = [x.at[slot] for x in self.slots[: f.num_results]]
            self.copies.store(slots, gmem.results, row=self.row(i), columns=self.begin(chunk))
            # The chunk before has had this one's time to be read out.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            self.fetch(i, chunk + c.slots - 1)
        return tuple(kept)

    def hold_vectors(self) -> None:
        """Those of the first tiles in registers, the others in shared memory."""
        c, gmem, me = self.c, self.gmem, self.me
        self.num_held = c.chunks * c.tiles - c.in_memory
        for j, k in itertools.product(range(len(gmem.vectors)), range(self.num_held)):
            ref = gmem.vectors[j].at[me.rank, me.wg, *divmod(k, c.tiles)]
            self.held[j, k] = self.load_vector(ref)
        if not gmem.vectors or not c.in_memory:
            return

        @pl.when(self.wg == 0)
        def _():
            for j, member, k in itertools.product(
                range(len(gmem.vectors)), range(c.members), range(c.in_memory)
            ):
                plgpu.copy_gmem_to_smem(
                    gmem.vectors[j].at[me.rank, member, *divmod(self.num_held + k, c.tiles)],
                    getattr(self.smem, f"vector{j}").at[member, k],
                    self.smem.vectors_full,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        plgpu.barrier_wait(self.smem.vectors_full)

    def vector_of(self, chunk: int, tile: int):
        """Loads vectors of a tile."""
        k = chunk * self.c.tiles + tile
        if k < self.num_held:
            return lambda j: self.held[j, k]

        def load(j):
            ref = getattr(self.smem, f"vector{j}").at[self.me.wg, k - self.num_held]
            return self.load_vector(ref)

        return load

    def load_vector(self, ref):
        """[A, M] of a tile's columns, the same in all rows of warps that have their own."""
        if not self.c.by_warps:
            return plgpu.load(ref, layout=self.layout, optimized=False)
        x_M = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x_M, self.shape, [1])
