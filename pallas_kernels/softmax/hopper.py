"""Softmax and its gradient on a Hopper GPU, one pass over memory each; norm/NOTES.md measures them.

Dims: R row, C column, A row or part of a row in a warpgroup's slot, P part.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import hopper_blocks, hopper_wide
from pallas_kernels.common.hopper_blocks import block_rows
from pallas_kernels.common.hopper_rows import Row, stream_rows
from pallas_kernels.common.hopper_rows_config import Config, config_for
from pallas_kernels.common.hopper_wide import wide_rows

LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)

WIDE = {
    32768: hopper_wide.Config(tiles=2, chunks=2, slots=5, ahead=True),
    131072: hopper_wide.Config(tiles=2, chunks=4, slots=7, cluster=2),
}
"""By columns: where it was measured to be faster than ``stream_rows`` (norm/NOTES.md)."""


def softmax(x_RC: jax.Array, *, config: Config | hopper_wide.Config | None = None) -> jax.Array:
    """``exp(x - max) / sum`` over columns, in the dtype of ``x``.

    By ``block_rows``, ``wide_rows`` or ``stream_rows``, where a config does not say which.
    """
    columns = x_RC.shape[1]
    if config is None and columns <= hopper_blocks.LONGEST_ROW:
        return block_rows(_softmax, [x_RC], num_statistics=2)
    config = (
        config or WIDE.get(columns) or config_for(x_RC.shape, x_RC.dtype.itemsize, num_inputs=1)
    )
    if isinstance(config, hopper_wide.Config):
        return wide_rows(_WIDE, [x_RC], config=config)[0]
    return stream_rows(_softmax, [x_RC], config=config, num_statistics=2)[0]


def _softmax(row: Row, sums: tuple[jax.Array, ...]):
    x = row.load(0)
    # A part that is all -inf, in a row that is not, must count as 0 and not as NaN.
    largest_A = jnp.maximum(jnp.max(x, axis=1), LOWEST)
    # Scaled after the difference: a mask's finfo.min times LOG2E would overflow.
    power = jnp.exp2((x - row.spread(largest_A, x.shape)) * LOG2E)
    sum_A = jnp.sum(power, axis=1)
    if row.whole:
        return power * row.spread(1.0 / sum_A, x.shape), sums
    # Each part has its own maximum; one exchange brings both numbers of all parts.
    largest, total = row.gather(_join, largest_A, sum_A)
    return power * row.spread(jnp.exp2((largest_A - largest) * LOG2E) / total, x.shape), sums


def _join(largest_P: jax.Array, sum_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(largest_P)
    return largest, jnp.sum(sum_P * jnp.exp2((largest_P - largest) * LOG2E))


def _fold(inputs, vectors, so_far):
    """Maximum and sum of exponentials against it, of each part (Milakov and Gimelshein 2018)."""
    del vectors
    x = inputs(0)
    largest_A = jnp.maximum(jnp.max(x, axis=1), LOWEST)
    if so_far is not None:
        largest_A = jnp.maximum(largest_A, so_far[0])
    sum_A = jnp.sum(jnp.exp2((x - lax.broadcast_in_dim(largest_A, x.shape, [0])) * LOG2E), axis=1)
    if so_far is not None:
        sum_A += so_far[1] * jnp.exp2((so_far[0] - largest_A) * LOG2E)
    return largest_A, sum_A


def _scalars(largest_P: jax.Array, sum_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest, total = _join(largest_P, sum_P)
    return largest, 1.0 / total


def _finish(inputs, vectors, scalars, sums):
    del vectors
    largest, factor = scalars
    return jnp.exp2((inputs(0) - largest) * LOG2E) * factor, sums


_WIDE = hopper_wide.Formula(fold=_fold, combine=_scalars, finish=_finish, num_statistics=2)


def softmax_gradient(
    y_RC: jax.Array, d_y_RC: jax.Array, *, config: Config | None = None
) -> jax.Array:
    """``y * (d_y - sum(y * d_y))``."""
    config = config or config_for(y_RC.shape, y_RC.dtype.itemsize, num_inputs=2)
    return stream_rows(_gradient, [y_RC, d_y_RC], config=config, num_statistics=1)[0]


def _gradient(row: Row, sums: tuple[jax.Array, ...]):
    y, d_y = row.load(0), row.load(1)
    (dot,) = row.total(jnp.sum(y * d_y, axis=1))
    return y * (d_y - row.spread(dot, y.shape)), sums
