"""Gives kernels that JAX cannot look into (custom calls) what it derives for ordinary code: vmap,
and partitioning over a mesh.
"""

import jax
import jax.numpy as jnp

from .sharding import DIMS, Kernel, MeshAxes, partitioned


def call_opaque(
    kernel: Kernel, operands: dict[str, jax.Array], results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    """``kernel(operands)`` under any of jit, vmap, scan, shard_map and sharded arrays.

    vmap folds its dim into the batch. A call with sinks, which have no batch dim, becomes a loop.

    Args:
        kernel: works on any batch and any heads.
        operands: by their names in ``sharding.DIMS``.
        results: names in ``sharding.DIMS`` of what the kernel returns.
        axes: see ``sharding.partitioned``.
    """
    names = tuple(operands)

    @jax.custom_batching.custom_vmap
    def op(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return partitioned(kernel, dict(zip(names, arrays, strict=True)), results, axes)

    @op.def_vmap
    def fold(axis_size: int, in_batched: list[bool], *arrays: jax.Array):
        whole = tuple(
            x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, batched in zip(arrays, in_batched, strict=True)
        )
        if all(DIMS[name][0] == "B" for name in (*names, *results)):
            outs = op(*(x.reshape(axis_size * x.shape[1], *x.shape[2:]) for x in whole))
            outs = tuple(x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]) for x in outs)
        else:
            outs = jax.lax.map(lambda one: op(*one), whole)
        return outs, (True,) * len(results)

    # XLA pulls a custom call into the fusion that stores its result in a slice of a loop's stacked
    # residuals, and where the result has another use it then runs the kernel twice.
    return jax.lax.optimization_barrier(op(*operands.values()))
