"""RMSNorm and its gradients on a Hopper GPU, one pass over memory each.

Dims: R row, C column, A row or part of a row in a warpgroup's slot.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import hopper_blocks, hopper_wide
from pallas_kernels.common.hopper_blocks import block_rows
from pallas_kernels.common.hopper_rows import Formula, Row, stream_rows
from pallas_kernels.common.hopper_rows_config import WARPS, Config, config_for
from pallas_kernels.common.hopper_wide import wide_rows

WIDE_FORWARD = {131072: hopper_wide.Config(tiles=2, slots=4, cluster=8, ahead=True)}
WIDE_BACKWARD = {
    32768: hopper_wide.Config(chunks=2, slots=5, cluster=2),
    131072: hopper_wide.Config(chunks=2, slots=4, cluster=8),
}
"""By columns: where it was measured to be faster than ``stream_rows`` (NOTES.md)."""


def rms_norm(
    x_RC: jax.Array,
    scale_C: jax.Array,
    *,
    epsilon: float,
    config: Config | hopper_wide.Config | None = None,
) -> jax.Array:
    """``x / sqrt(mean(x**2) + epsilon) * scale``, in the dtype of ``x``; scale is fp32.

    By ``block_rows``, ``wide_rows`` or ``stream_rows``, where a config does not say which.
    """
    columns = x_RC.shape[1]
    if config is None and columns <= hopper_blocks.LONGEST_ROW:
        formula = _forward(columns, epsilon)
        return block_rows(formula, [x_RC], vectors_C=[scale_C], num_statistics=1, most_turns=2)
    config = config or WIDE_FORWARD.get(columns)
    config = config or config_for(x_RC.shape, x_RC.dtype.itemsize, num_inputs=1, num_vectors=1)
    if isinstance(config, hopper_wide.Config):
        wide = _wide_forward(columns, epsilon)
        return wide_rows(wide, [x_RC], vectors_C=[scale_C], config=config)[0]
    formula = _forward(columns, epsilon)
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
    config: Config | hopper_wide.Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of x, in its dtype, and of the scale, fp32.

    With ``r = 1 / sqrt(mean(x**2) + epsilon)`` and ``g = scale * d_y``:
    ``d_x = r * (g - x * r**2 * mean(g * x))`` and ``d_scale = sum_R(d_y * x * r)``. The root is
    computed again: x is read anyway.
    """
    columns = x_RC.shape[1]
    config = config or WIDE_BACKWARD.get(columns)
    config = config or config_for(
        x_RC.shape, x_RC.dtype.itemsize, num_inputs=2, num_vectors=1, accumulates=True
    )
    if isinstance(config, hopper_wide.Config):
        wide = _wide_backward(columns, epsilon)
        d_x, partials_NC = wide_rows(wide, [x_RC, d_y_RC], vectors_C=[scale_C], config=config)
    else:
        d_x, partials_NC = stream_rows(
            _backward(columns, epsilon), [x_RC, d_y_RC], vectors_C=[scale_C], config=config,
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


def _wide_forward(columns: int, epsilon: float) -> hopper_wide.Formula:
    def fold(inputs, vectors, so_far):
        del vectors
        x = inputs(0)
        square_A = jnp.sum(x * x, axis=1)
        return (square_A if so_far is None else so_far[0] + square_A,)

    def combine(square_P):
        return (lax.rsqrt(jnp.sum(square_P) * (1.0 / columns) + epsilon),)

    def finish(inputs, vectors, scalars, sums):
        return inputs(0) * scalars[0] * vectors(0), sums

    return hopper_wide.Formula(fold=fold, combine=combine, finish=finish, num_statistics=1)


def _wide_backward(columns: int, epsilon: float) -> hopper_wide.Formula:
    def fold(inputs, vectors, so_far):
        x = inputs(0)
        numbers = jnp.sum(x * x, axis=1), jnp.sum(inputs(1) * vectors(0) * x, axis=1)
        return numbers if so_far is None else tuple(map(jnp.add, so_far, numbers))

    def combine(square_P, dot_P):
        root = lax.rsqrt(jnp.sum(square_P) * (1.0 / columns) + epsilon)
        return root, jnp.sum(dot_P) * root * root * root * (1.0 / columns)

    def finish(inputs, vectors, scalars, sums):
        root, slope = scalars
        x, d_y = inputs(0), inputs(1) * root
        return d_y * vectors(0) - x * slope, (sums[0] + d_y * x,)

    return hopper_wide.Formula(
        fold=fold, combine=combine, finish=finish, num_statistics=2, num_accumulators=1
    )
