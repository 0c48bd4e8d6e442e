"""The call of a kernel whose rows are shared by the blocks of a cluster, on a Hopper GPU.

Dims: R row, C column.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import WARPS

from .config import Twice, Wide
from .formula import Formula, compiler_params
from .smem import REDUCTION_BYTES


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
    """Results and partial sums; formula and arrays as in ``apply.apply_rows``.

    Args:
        run: one warpgroup, given arrays in global memory (inputs, vectors, results, of_rows, sums)
            and buffers in shared memory.
        row_shape: of a row as the blocks, warpgroups, chunks and warps divide it.
        num_workers: clusters in the grid, each with a partial sum of its own.
        scratch: the buffers, by name.
    """
    (num_rows, columns), dtype = inputs_RC[0].shape, inputs_RC[0].dtype
    assert columns == config.columns, (columns, config)
    shape = (num_rows, *row_shape)
    of_row = (num_rows, config.cluster, config.warpgroups, WARPS)
    partial = jax.ShapeDtypeStruct((num_workers, *row_shape), jnp.float32)
    found = launch(
        run,
        name=formula.name,
        operands={
            "inputs": [x.reshape(shape) for x in inputs_RC],
            "vectors": [v.reshape(row_shape) for v in vectors_C],
        },
        results={
            "results": [jax.ShapeDtypeStruct(shape, each) for each in formula.dtypes(dtype)],
            "of_rows": [jax.ShapeDtypeStruct(of_row, jnp.float32)] * formula.num_row_results,
            "sums": [partial] * formula.num_sums,
        },
        scratch=scratch,
        grid=(num_workers,),
        grid_names=("worker",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=config.warpgroups,
        compiler_params=compiler_params(dtype, REDUCTION_BYTES),
    )
    return (
        (
            *(x.reshape(num_rows, columns) for x in found["results"]),
            *(x[:, 0, 0, 0] for x in found["of_rows"]),
        ),
        tuple(x.reshape(-1, columns) for x in found["sums"]),
    )
