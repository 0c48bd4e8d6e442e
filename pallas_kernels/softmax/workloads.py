"""Softmax calls, shared by tests and benchmark. Dims: R row, C column."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.rows.dispatch import BARS, OTHERS, RowWorkload

WORKLOADS = (*BARS, *OTHERS)


def arrays(
    workload: RowWorkload, key: jax.Array, dtype: DTypeLike = jnp.bfloat16
) -> dict[str, jax.Array]:
    """x and the gradient of the result, both [R, C]."""
    keys = jax.random.split(key)
    shape = (workload.rows, workload.columns)
    return {
        "x": 3 * jax.random.normal(keys[0], shape, dtype),
        "d_y": jax.random.normal(keys[1], shape, dtype),
    }
