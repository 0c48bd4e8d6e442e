"""RMSNorm and its gradients on a Hopper GPU, one pass over memory each.

Dims: R row, C column, A row or part of a row in a warpgroup's slot.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.hopper_rows import Formula, Row, stream_rows
from pallas_kernels.common.hopper_rows_config import WARPS, Config, config_for


def rms_norm(
    x_RC: jax.Array, scale_C: jax.Array, *, epsilon: float, config: Config | None = None
) -> jax.Array:
    """``x / sqrt(mean(x**2) + epsilon) * scale``, in the dtype of ``x``; scale is fp32."""
    config = config or config_for(x_RC.shape, x_RC.dtype.itemsize, num_inputs=1, num_vectors=1)
    formula = _forward(x_RC.shape[1], epsilon)
    return stream_rows(formula, [x_RC], vectors_C=[scale_C], config=config, num_statistics=1)[0]


def _forward(columns: int, epsilon: float) -> Formula:
    def formula(row: Row, sums: tuple[jax.Array, ...]):
        x = row.load(0)
        (square,) = row.total(jnp.sum(x * x, axis=1))
        root = lax.rsqrt(square * (1.0 / columns) + epsilon)
        return x * row.spread(root, x.shape) * row.vector(0), sums

    return formula


def rms_norm_gradient(
    x_RC: jax.Array,
    scale_C: jax.Array,
    d_y_RC: jax.Array,
    *,
    epsilon: float,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x, in its dtype, and of the scale, fp32.

    With ``r = 1 / sqrt(mean(x**2) + epsilon)`` and ``g = scale * d_y``:
    ``d_x = r * (g - x * r**2 * mean(g * x))`` and ``d_scale = sum_R(d_y * x * r)``. The root is
    computed again: x is read anyway.
    """
    config = config or config_for(x_RC.shape, x_RC.dtype.itemsize, num_inputs=2, num_vectors=1)
    d_x, partials_NC = stream_rows(
        _backward(x_RC.shape[1], epsilon), [x_RC, d_y_RC], vectors_C=[scale_C], config=config,
        num_statistics=2, num_accumulators=1,
    )  # fmt: skip
    return d_x, jnp.sum(partials_NC, axis=0)


def _backward(columns: int, epsilon: float) -> Formula:
    def formula(row: Row, sums: tuple[jax.Array, ...]):
        x = row.load(0)
        dot_A = jnp.sum(row.load(1) * row.vector(0) * x, axis=1)
        square, dot = row.total(jnp.sum(x * x, axis=1), dot_A)
        root = lax.rsqrt(square * (1.0 / columns) + epsilon)
        slope = dot * root * root * root * (1.0 / columns)
        # Read again: held across the exchange, they would cost a register a column.
        x, d_y = row.load(0), row.load(1)
        d_y = d_y * row.spread(root, x.shape)
        d_x = d_y * row.vector(0) - x * row.spread(slope, x.shape)
        return d_x, (sums[0] + _fold(d_y * x),)

    return formula


def _fold(x_AM: jax.Array) -> jax.Array:
    """Adds the rows of each warp: [4, M]."""
    rows, columns = x_AM.shape
    parts = [lax.slice(x_AM, (i, 0), (i + WARPS, columns)) for i in range(0, rows, WARPS)]
    return sum(parts[1:], parts[0])
