"""Rows of a few thousand columns on a Hopper GPU: a few to a block, straight through registers.

Nothing is read ahead. Ten small blocks share a multiprocessor, and while one reduces others load
and store; the hardware starts the next where one ends. Where a row fits a warpgroup's registers
this is closer to a copy's rate than ``hopper_rows``, whose copy engine reads and writes at 90% of
it (norm/NOTES.md).

Dims: R row, C column, A row or part in a warpgroup, M column of a part, P part of a row.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .errors import UnsupportedError
from .hopper_rows import Combine, Formula, Row, lane_layout, tile_layout
from .hopper_rows_config import LANES, LONGEST_WHOLE_ROW, WARPS

LONGEST_ROW = 8192
"""Columns: 64 to a thread."""


def why_not(shape: tuple[int, int]) -> str | None:
    """Why rows of this shape have no such kernel; None if they have."""
    rows, columns = shape
    if not 0 < columns <= LONGEST_ROW:
        return f"rows of 1 to {LONGEST_ROW} columns fit a warpgroup, not {columns}"
    whole = columns <= LONGEST_WHOLE_ROW
    multiple = LANES if whole else LANES * WARPS
    if columns % multiple:
        return f"{columns} columns are not a multiple of {multiple}"
    if whole and rows % WARPS:
        return f"{rows} rows of {columns} columns are not a multiple of {WARPS} rows"
    return None


def block_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    num_statistics: int,
    vectors_C: Sequence[jax.Array] = (),
    most_turns: int = 1,
) -> jax.Array:
    """Applies a formula without accumulators to every row.

    Args:
        formula, inputs_RC, num_statistics: as in ``hopper_rows.stream_rows``.
        vectors_C: fp32, the same for all rows; a block reads them once.
        most_turns: units that a block does one after another, which spares reading the vectors.

    Raises:
        UnsupportedError: such rows have no such kernel.
    """
    rows, columns = inputs_RC[0].shape
    dtype = inputs_RC[0].dtype
    reason = why_not((rows, columns))
    if reason is not None:
        raise UnsupportedError(f"{reason} in the Hopper kernels over rows; plain JAX takes any")
    whole = columns <= LONGEST_WHOLE_ROW
    if whole:
        most = max(1, LONGEST_WHOLE_ROW // columns)
        batch = next(r for r in range(most, 0, -1) if rows % (WARPS * r) == 0)
        shape, vector_shape = (WARPS * batch, columns), (1, columns)
    else:
        shape = vector_shape = (WARPS, columns // WARPS)
    units = rows * columns // (shape[0] * shape[1])
    turns = next(t for t in range(most_turns, 0, -1) if units % t == 0)
    vector = next(
        v for v in (16 // dtype.itemsize, 4, 2, 1) if shape[1] % (LANES * v) == 0
    )  # columns that a thread holds side by side
    layout = tile_layout(vector)

    def body(*refs):
        inputs, per_column = refs[: len(inputs_RC)], refs[len(inputs_RC) : -2]
        out, parts = refs[-2:]
        first = lax.axis_index("block") * turns
        held = [_load_vector(ref, shape, layout) for ref in per_column]

        def turn(i, _):
            def load(j):
                x = plgpu.load(inputs[j].at[first + i], layout=layout, optimized=False)
                return x.astype(jnp.float32)

            row = Row(
                load=load,
                vector=lambda j: held[j],
                gather=functools.partial(_gather, parts.at[lax.rem(i, 2)], num_statistics),
                whole=whole,
            )
            result, _ = formula(row, ())
            out[first + i] = result.astype(dtype)
            return ()

        lax.fori_loop(0, turns, turn, ())

    tiled = (units, *shape)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(tiled, dtype),
        scratch_types=(plgpu.SMEM((2, num_statistics, WARPS), jnp.float32),),
        grid=(units // turns,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=256
        ),
    )(
        *(x.reshape(tiled) for x in inputs_RC), *(v.reshape(vector_shape) for v in vectors_C)
    ).reshape(rows, columns)


def _load_vector(ref, shape: tuple[int, int], layout) -> jax.Array:
    if ref.shape == shape:
        return plgpu.load(ref, layout=layout, optimized=False)
    x_M = plgpu.load(ref.at[0], layout=layout.reduce(0), optimized=False)
    return lax.broadcast_in_dim(x_M, shape, [1])


def _gather(ref, num_statistics: int, combine: Combine, *parts_A: jax.Array):
    """Through shared memory; in turns, so that one barrier is enough."""
    for j, part_A in enumerate(parts_A):
        ref[j, pl.ds(0, WARPS)] = part_A
    plgpu.commit_smem()
    layout = lane_layout(WARPS)
    return combine(
        *(plgpu.load(ref.at[j], layout=layout, optimized=False) for j in range(num_statistics))
    )
