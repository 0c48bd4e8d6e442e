"""RMSNorm calls, shared by tests and benchmark. Dims: R row, C column."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.rows.dispatch import BARS, OTHERS, RowWorkload

WORKLOADS = (*BARS, *OTHERS)
EPSILON = 1e-6


def arrays(
    workload: RowWorkload, key: jax.Array, dtype: DTypeLike = jnp.bfloat16
) -> dict[str, jax.Array]:
    """x and the gradient of the result, [R, C], and the scale, fp32 [C]."""
    keys = jax.random.split(key, 3)
    shape = (workload.rows, workload.columns)
    return {
        "x": 3 * jax.random.normal(keys[0], shape, dtype),
        "d_y": jax.random.normal(keys[1], shape, dtype),
        "scale": 1.0 + 0.1 * jax.random.normal(keys[2], shape[1:], jnp.float32),
    }
