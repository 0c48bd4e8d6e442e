"""The call of a kernel whose rows are shared by the blocks of a cluster, on a Hopper GPU.

Dims: R row, C column.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .hopper_formula import Formula, compiler_params
from .hopper_rows_config import WARPS, Twice, Wide
from .hopper_smem import REDUCTION_BYTES


def call_clusters(
    run: Callable[[types.SimpleNamespace, types.SimpleNamespace], None],
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    vectors_C: Sequence[jax.Array],
    *,
    config: Wide | Twice,
    row_shape: tuple[int, ...],
    num_workers: int,
    scratch: dict[str, Any],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results and partial sums; formula and arrays as in ``hopper_rows.apply_rows``.

    Args:
        run: one warpgroup, given arrays in global memory (inputs, vectors, results, of_rows, sums)
            and buffers in shared memory.
        row_shape: of a row as the blocks, warpgroups, chunks and warps divide it.
        num_workers: clusters in the grid, each with a partial sum of its own.
        scratch: the buffers, by name.
    """
    (num_rows, columns), dtype = inputs_RC[0].shape, inputs_RC[0].dtype
    assert columns == config.columns, (columns, config)
    num_operands = len(inputs_RC) + len(vectors_C)
    num_results = formula.num_results
    num_outs = num_results + formula.num_row_results + formula.num_sums

    def body(*refs):
        operands, outs = refs[:num_operands], refs[num_operands:]
        gmem = types.SimpleNamespace(
            inputs=operands[: len(inputs_RC)],
            vectors=operands[len(inputs_RC) :],
            results=outs[:num_results],
            of_rows=outs[num_results : num_outs - formula.num_sums],
            sums=outs[num_outs - formula.num_sums : num_outs],
        )
        run(gmem, types.SimpleNamespace(**dict(zip(scratch, outs[num_outs:], strict=True))))

    shape = (num_rows, *row_shape)
    of_row = (num_rows, config.cluster, config.warpgroups, WARPS)
    partial = jax.ShapeDtypeStruct((num_workers, *row_shape), jnp.float32)
    outs = plgpu.kernel(
        body,
        out_type=(
            *[jax.ShapeDtypeStruct(shape, each) for each in formula.dtypes(dtype)],
            *[jax.ShapeDtypeStruct(of_row, jnp.float32)] * formula.num_row_results,
            *[partial] * formula.num_sums,
        ),
        scratch_types=tuple(scratch.values()),
        grid=(num_workers,),
        grid_names=("worker",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=config.warpgroups,
        thread_name="wg",
        compiler_params=compiler_params(dtype, REDUCTION_BYTES),
    )(*(x.reshape(shape) for x in inputs_RC), *(v.reshape(row_shape) for v in vectors_C))
    return (
        (
            *(x.reshape(num_rows, columns) for x in outs[:num_results]),
            *(x[:, 0, 0, 0] for x in outs[num_results : num_outs - formula.num_sums]),
        ),
        tuple(x.reshape(-1, columns) for x in outs[num_outs - formula.num_sums :]),
    )
