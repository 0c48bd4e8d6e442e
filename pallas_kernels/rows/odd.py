"""Rows of lengths that nothing divides, through a Hopper GPU: straight from and to global memory.

Such rows begin anywhere, where the copy engine cannot. A row's window begins and ends where as many
columns as a thread reads at once do, ``vector``: at most so many less one at either end are a
neighbor's. They do not count, and only the window's first and last vector are written in single
columns. If ``vector`` divides the length, the window is the row. The warpgroups of a row take its
tiles in turn, and the last tile begins so early that it ends where the row does: the columns that
it shares with the tile before count once, and are written twice, the same. What is read stays in
registers, or in shared memory where only the thread that put it there looks; what fits in neither
is read again. A row is a block, and the hardware runs several side by side: while one reduces,
others load and store. With sums over rows a block goes from row to row.

Dims: R row, C column, A part of a tile, a warp's, M column of a part, P warpgroup of a row.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .config import Odd, lane_layout, tile_layout
from .counts import Counted, members_and_warps, odd_bounds, of_tiles, warps, within
from .edges import write_between
from .formula import Formula, Parts, RowCall, compiler_params, to_columns, to_parts
from .smem import REDUCTION_BYTES, TURNS, odd_scratch


def odd_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Odd,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; arguments as in ``apply.apply_rows``."""
    assert formula.may_cut, "columns that must not count have no value in this formula"
    assert formula.again is None
    (num_rows, columns), dtype = inputs_RC[0].shape, inputs_RC[0].dtype
    assert num_rows * columns % config.vector == 0, "the last window would reach beyond the array"
    assert not (formula.num_sums and columns % config.vector), "sums of shifted columns"
    num_workers = min(config.most_workers, num_rows) if formula.num_sums else num_rows
    sums = (num_workers, config.tiles, config.warpgroups, WARPS, config.tile)
    found = launch(
        functools.partial(_run, formula, config, (num_rows, num_workers, columns)),
        name=formula.name,
        operands={
            "inputs": [x.reshape(-1) for x in inputs_RC],
            "vectors": [_shifted(x, config, columns) for x in vectors_C],
        },
        results={
            "results": [
                jax.ShapeDtypeStruct((num_rows * columns,), each) for each in formula.dtypes(dtype)
            ],
            "sums": [jax.ShapeDtypeStruct(sums, jnp.float32)] * formula.num_sums,
        },
        scratch=odd_scratch(config, RowCall.of(formula, inputs_RC, vectors_C)),
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=config.warpgroups,
        compiler_params=compiler_params(dtype, REDUCTION_BYTES),
    )
    results = tuple(x.reshape(num_rows, columns) for x in found["results"])
    return results, tuple(_whole(x, columns) for x in found["sums"])


def _shifted(vector_C: jax.Array, c: Odd, columns: int) -> jax.Array:
    """Where windows begin before their rows, by 0 to ``vector`` - 1 columns: as each needs it."""
    if columns % c.vector == 0:
        return vector_C
    width = c.window(columns)
    return jnp.concatenate([jnp.pad(vector_C, (k, width - columns - k)) for k in range(c.vector)])


def _whole(sums_NTPAM: jax.Array, columns: int) -> jax.Array:
    """Sums of tiles, T tiles of P warpgroups in order, as those of columns: [N, C]."""
    tile = sums_NTPAM.shape[-2] * sums_NTPAM.shape[-1]
    flat = sums_NTPAM.reshape(sums_NTPAM.shape[0], -1)
    before = (-(-columns // tile) - 1) * tile
    last = flat[:, before : before + tile]
    return jnp.concatenate([flat[:, :before], last[:, tile - (columns - before) :]], axis=1)


def _run(f: Formula, c: Odd, sizes: tuple[int, int, int], gmem, smem) -> None:
    """One warpgroup: its rows, one after another."""
    num_rows, num_workers, columns = sizes
    worker = lax.axis_index("worker")
    row = _Row(f, c, columns, gmem, smem)
    if not f.num_sums:
        row.work(worker, jnp.int32(0), ())
        return
    zero = plgpu.layout_cast(jnp.zeros((WARPS, c.tile), jnp.float32), tile_layout(c.vector))
    count = lax.div(num_rows - worker + num_workers - 1, num_workers)

    def step(i, sums):
        return row.work(worker + i * num_workers, i, sums)

    sums = lax.fori_loop(0, count, step, (zero,) * (f.num_sums * c.tiles))
    for k, value in enumerate(sums):
        i, j = divmod(k, f.num_sums)
        write_registers(value, gmem.sums[j].at[worker, i, row.wg])


class _Row:
    """What a warpgroup does with one row; the methods are traced once."""

    def __init__(self, f: Formula, c: Odd, columns: int, gmem, smem):
        self.f, self.c, self.columns, self.gmem, self.smem = f, c, columns, gmem, smem
        self.wg = lax.axis_index("wg")
        self.layout = tile_layout(c.vector)
        self.shape = (WARPS, c.tile)
        self.shifts = columns % c.vector > 0
        self.shift: jax.Array | int = 0  # columns of the window before the row

    def place(self, i):
        """Where the i-th tile of this warpgroup begins in the window; the bounds, in the tile, of
        the columns that count.
        """
        start, bounds = odd_bounds(self.c, self.columns, self.shift, self.wg, i)
        return pl.multiple_of(start, self.c.vector), bounds

    def parts(self) -> Parts:
        """Of the row."""
        c = self.c
        if self.f.uneven is None:
            return Parts(whole=False)
        member_P, warp_P = members_and_warps(c.warpgroups * WARPS)

        def count(i):
            _, bounds = odd_bounds(c, self.columns, self.shift, member_P, i)
            return within(warp_P * c.tile, c.tile, bounds)

        whole = [self.is_whole(i) for i in range(c.tiles)]
        return Parts(whole=False, counts=of_tiles(c.tile, whole, count))

    def own(self, bounds, x, fill=0.0):
        """x [A, M] in the columns within bounds, ``fill`` elsewhere."""
        warp, column = (
            plgpu.broadcasted_iota(jnp.int32, self.shape, dim, layout=self.layout) for dim in (0, 1)
        )
        at = warp * self.c.tile + column
        counts = at >= bounds[0]
        if self.shifts:
            counts = counts & (at < bounds[1])
        return jnp.where(counts, x, fill)

    def read(self, ref, row, start):
        """A tile [A, M] of a row."""
        return self.load(self.tile(ref, row, start))

    def load(self, place):
        """A tile [A, M]."""
        if self.c.interpretable:
            return place[...].reshape(self.shape)
        return plgpu.load(place.reshape(self.shape), layout=self.layout, optimized=False)

    def write(self, value, ref, row, start):
        """A tile [A, M] of a row."""
        place = self.tile(ref, row, start)
        if self.shifts:
            bounds = self.shift - start, self.shift + self.columns - start
            if self.c.interpretable:
                value = self.own(bounds, value, self.load(place))
            else:
                write_between(value, place, bounds, vector=self.c.vector)
                return
        if self.c.interpretable:
            place[...] = value.reshape(-1)
        else:
            write_registers(value, place.reshape(self.shape))

    def tile(self, ref, row, start):
        """The place of a tile in rows that lie one after another."""
        start = pl.multiple_of(row * self.columns - self.shift + start, self.c.vector)
        return ref.at[pl.ds(start, self.c.columns)]

    def vectors(self, start):
        """Loads vectors of a tile."""
        start = pl.multiple_of(self.shift * self.c.window(self.columns) + start, self.c.vector)
        return lambda j: self.load(self.gmem.vectors[j].at[pl.ds(start, self.c.columns)])

    def fold(self, tiles, i, *, whole: bool):
        """How many columns of the i-th tile count, and its numbers, given its inputs."""
        start, bounds = self.place(i)
        load, vector, columns = self.inputs(tiles), self.vectors(start), self.c.tile
        if whole:
            return columns, self.f.fold(load, vector)
        if self.f.uneven is not None:
            columns = within(warps(self.layout) * self.c.tile, self.c.tile, bounds)
        counted = Counted(columns=columns, own=functools.partial(self.own, bounds))
        return columns, self.f.fold_cut(load, vector, counted)

    def inputs(self, tiles):
        """Loads of a tile, given its inputs."""
        return lambda j: tiles[j].astype(jnp.float32)

    def is_whole(self, i: int) -> bool:
        """Whether all columns of the i-th tile count, of any warpgroup and row."""
        return i < self.c.tiles - 1 and not (self.shifts and i == 0)

    def merge(self, found, more):
        """Columns and numbers of some tiles, and those of one more."""
        (seen, numbers), (columns, of_one) = found, more
        return seen + columns, self.f.merge(seen, columns, numbers, of_one)

    def finish(self, tiles, row, i, totals):
        """Writes the results of the i-th tile; what is summed over rows."""
        start, bounds = self.place(i)
        results, addends = self.f.finish(self.inputs(tiles), self.vectors(start), totals)
        for out, result in zip(self.gmem.results, results, strict=True):
            self.write(result.astype(out.dtype), out, row, start)
        return [self.own(bounds, x) for x in addends]

    def work(self, row, turn, sums):
        """One row; the sums with its own added."""
        if self.shifts:
            self.shift = lax.rem(row * self.columns, self.c.vector)
        if self.c.in_memory:
            return self.by_memory(row, turn)
        c = self.c
        tiles = [
            [self.read(x, row, self.place(i)[0]) for x in self.gmem.inputs] for i in range(c.tiles)
        ]

        folds = (self.fold(tiles[i], i, whole=self.is_whole(i)) for i in range(c.tiles))
        _, numbers = functools.reduce(self.merge, folds)
        totals = self.together(turn, numbers)
        added = []
        for i in range(c.tiles):
            added += self.finish(tiles[i], row, i, totals)
        return tuple(a + b for a, b in zip(sums, added, strict=True))

    def by_memory(self, row, turn):
        """One row, of which the last tiles stay in shared memory; the others are read again, from
        L2 as far as those of all rows at work fit there.
        """
        c, gmem, smem = self.c, self.gmem, self.smem
        held = [getattr(smem, f"held{j}").at[self.wg] for j in range(len(gmem.inputs))]
        again = c.tiles - c.in_memory  # tiles before those that stay

        def read(i):
            return [self.read(x, row, self.place(i)[0]) for x in gmem.inputs]

        def kept(i):
            refs = [ref.at[i - again] for ref in held]
            return [plgpu.load(ref, layout=self.layout, optimized=False) for ref in refs]

        def look(i, *, stays, whole):
            tiles = read(i)
            if stays:
                for x, ref in zip(tiles, held, strict=True):
                    write_registers(x, ref.at[i - again])
            return self.fold(tiles, i, whole=whole)

        def merge(i, found, *, stays, whole=True):
            return self.merge(found, look(i, stays=stays, whole=whole))

        last = c.tiles - 1
        columns, numbers = look(jnp.int32(0), stays=again == 0, whole=self.is_whole(0))
        found = to_parts(jnp.asarray(columns, jnp.float32), self.layout), numbers
        found = lax.fori_loop(1, again, functools.partial(merge, stays=False), found)
        stay = functools.partial(merge, stays=True)
        found = lax.fori_loop(max(again, 1), last, stay, found)
        _, numbers = stay(jnp.int32(last), found, whole=False) if last else found
        totals = self.together(turn, numbers)

        def finish(i, _, tiles):
            self.finish(tiles(i), row, i, totals)
            return ()

        lax.fori_loop(0, again, functools.partial(finish, tiles=read), ())
        return lax.fori_loop(again, c.tiles, functools.partial(finish, tiles=kept), ())

    def together(self, turn, numbers):
        """Totals [A, M] of the row, from the numbers of all its warpgroups."""
        found = self.f.join(self.parts(), *self.exchange(turn, numbers))
        return [to_columns(x, self.shape) for x in found]

    def exchange(self, turn, numbers):
        """The numbers of all warps of the row, [P] each."""
        c, smem = self.c, self.smem
        slot, barrier = lax.rem(turn, TURNS), smem.exchanged.at[lax.rem(turn, 2)]
        for j, number_A in enumerate(numbers):
            smem.numbers[slot, j, pl.ds(self.wg * WARPS, WARPS)] = number_A
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        layout = lane_layout(c.warpgroups * WARPS)
        return [
            plgpu.load(smem.numbers.at[slot, j], layout=layout, optimized=False)
            for j in range(len(numbers))
        ]
