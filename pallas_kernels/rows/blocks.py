"""Rows of a few thousand columns on a Hopper GPU: a few to a block, straight through registers.

Nothing is read ahead. Ten small blocks share a multiprocessor, and while one reduces others load
and store; the hardware starts the next where one ends. Where a row fits a warpgroup's registers
this is closer to a copy's rate than ``stream``, whose copy engine reads and writes at 90% of
it (norm/NOTES.md).

Dims: R row, C column, A row or part in a warpgroup, M column of a part, P part of a row.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers

from .config import Blocks, lane_layout, tile_layout
from .formula import MASK, Formula, Parts, compiler_params, to_columns, to_parts


def block_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    config: Blocks,
    vectors_C: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """The results of a formula without sums; arguments as in ``apply.apply_rows``."""
    assert formula.num_sums == 0
    rows, columns = inputs_RC[0].shape
    dtypes = formula.dtypes(inputs_RC[0].dtype)
    if config.rows_per_warp:
        shape, vector_shape = (WARPS * config.rows_per_warp, columns), (1, columns)
    else:
        shape = vector_shape = (WARPS, columns // WARPS)
    units = rows * columns // (shape[0] * shape[1])
    turns = next(t for t in range(config.most_turns, 0, -1) if units % t == 0)
    layout = tile_layout(config.vector)
    parts = Parts(whole=bool(config.rows_per_warp))
    num_operands = len(inputs_RC) + len(vectors_C)

    def body(*refs):
        inputs, per_column = refs[: len(inputs_RC)], refs[len(inputs_RC) : num_operands]
        outs, exchange = refs[num_operands:-1], refs[-1]
        results, of_rows = outs[: formula.num_results], outs[formula.num_results :]
        first = lax.axis_index("block") * turns
        held = [_load_vector(ref, shape, layout) for ref in per_column]

        def turn(i, _):
            def read(j):
                tile = plgpu.load(inputs[j].at[first + i], layout=layout, optimized=False)
                return tile.astype(jnp.float32)

            # Masks are read again, from L1: held, each of their bytes would take a register.
            tiles = {j: read(j) for j, x in enumerate(inputs) if x.dtype != MASK}

            def load(j):
                return tiles[j] if j in tiles else read(j)

            vector = held.__getitem__

            def together(j, numbers):
                if parts.whole:
                    return numbers
                return _exchange(exchange.at[lax.rem(i * formula.num_turns + j, 2)], numbers)

            totals = formula.join(parts, *together(0, formula.fold(load, vector)))
            if formula.again is not None:
                spread = [to_columns(x, shape) for x in totals]
                numbers = formula.again.fold(load, vector, spread)
                totals = (*totals, *formula.again.join(parts, *together(1, numbers)))
            spread = [to_columns(x, shape) for x in totals]
            for out, result in zip(results, formula.finish(load, vector, spread)[0], strict=True):
                write_registers(result.astype(out.dtype), out.at[first + i])
            for out, total in zip(of_rows, totals[len(totals) - len(of_rows) :], strict=True):
                write_registers(to_parts(total, layout), out.at[first + i])
            return ()

        lax.fori_loop(0, turns, turn, ())

    tiled = (units, *shape)
    outs = plgpu.kernel(
        body,
        out_type=(
            *[jax.ShapeDtypeStruct(tiled, dtype) for dtype in dtypes],
            *[jax.ShapeDtypeStruct(tiled[:2], jnp.float32)] * formula.num_row_results,
        ),
        scratch_types=(plgpu.SMEM((2, formula.num_numbers, WARPS), jnp.float32),),
        grid=(units // turns,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        kernel_name=formula.name,
        compiler_params=compiler_params(inputs_RC[0].dtype, 256),
    )(*(x.reshape(tiled) for x in inputs_RC), *(v.reshape(vector_shape) for v in vectors_C))
    whole = tuple(out.reshape(rows, columns) for out in outs[: formula.num_results])
    of_rows = outs[formula.num_results :]
    return *whole, *(x.reshape(rows) if parts.whole else x[:, 0] for x in of_rows)


def _load_vector(ref, shape: tuple[int, int], layout) -> jax.Array:
    if ref.shape == shape:
        return plgpu.load(ref, layout=layout, optimized=False)
    x_M = plgpu.load(ref.at[0], layout=layout.reduce(0), optimized=False)
    return lax.broadcast_in_dim(x_M, shape, [1])


def _exchange(ref, numbers: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Through shared memory; in turns, so that one barrier is enough."""
    for j, number_A in enumerate(numbers):
        ref[j, pl.ds(0, WARPS)] = number_A
    plgpu.commit_smem()
    layout = lane_layout(WARPS)
    return [plgpu.load(ref.at[j], layout=layout, optimized=False) for j in range(len(numbers))]
