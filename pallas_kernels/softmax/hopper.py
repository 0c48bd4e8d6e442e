"""Softmaxes and their gradients on a Hopper GPU, one pass over memory each.

norm/NOTES.md measures them. Dims: R row, C column, A row or part of a row in a warpgroup, P part.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.rows.apply import apply_rows
from pallas_kernels.rows.config import RowConfig
from pallas_kernels.rows.formula import MASK, Formula, Load, Parts, add, to_columns

LOWEST = float(jnp.finfo(jnp.float32).min)


def softmax(
    x_RC: jax.Array,
    where_RC: jax.Array | None = None,
    *,
    log: bool = False,
    config: RowConfig | None = None,
) -> jax.Array:
    """``exp(x - max) / sum`` over columns or its logarithm, in the dtype of ``x``.

    Args:
        where_RC: bool: which columns count. Others' results are 0. Not with ``log``. The kernel
            reads bytes: XLA copies the mask, unless what computes it can write them itself.
    """
    inputs = [x_RC] if where_RC is None else [x_RC, where_RC.astype(MASK)]
    formula = forward(log=log, masked=where_RC is not None)
    return apply_rows(formula, inputs, config=config)[0][0]


def forward(*, log: bool, masked: bool) -> Formula:
    """Inputs x and, if masked, where, which is 1 or 0; there is no masked logarithm.

    In one pass (Milakov and Gimelshein 2018): each part against its own maximum.
    """
    assert not (log and masked)

    def row(load: Load) -> jax.Array:
        return jnp.where(load(1) != 0.0, load(0), -jnp.inf) if masked else load(0)

    def fold(load: Load, vector: Load):
        del vector
        x = row(load)
        # A part that is all -inf, in a row that is not, must count as 0 and not as NaN.
        largest_A = jnp.maximum(jnp.max(x, axis=1), LOWEST)
        power = jnp.exp(x - to_columns(largest_A, x.shape))
        return largest_A, jnp.sum(power, axis=1)

    def merge(seen, columns, numbers_A, more_A):
        del seen, columns
        largest_A = jnp.maximum(numbers_A[0], more_A[0])
        sums = [s * jnp.exp(m - largest_A) for m, s in (numbers_A, more_A)]
        return largest_A, sums[0] + sums[1]

    def join(parts: Parts, largest_P: jax.Array, sum_P: jax.Array):
        largest = parts.max(largest_P)
        lower_P = largest_P - parts.spread(largest, largest_P)
        total = parts.sum(sum_P * jnp.exp(lower_P))
        return largest, jnp.log(total) if log else 1.0 / total

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        del vector
        largest, total = totals
        apart = load(0) - largest
        if log:
            return (apart - total,), ()
        y = jnp.exp(apart) * total
        return (jnp.where(load(1) != 0.0, y, 0.0) if masked else y,), ()

    return Formula(
        name="log_softmax" if log else "softmax",
        fold=fold, merge=merge, join=join, finish=finish, num_numbers=2, neutral=(-jnp.inf, 0.0)
    )  # fmt: skip


def softmax_gradient(
    y_RC: jax.Array, d_y_RC: jax.Array, *, config: RowConfig | None = None
) -> jax.Array:
    """``y * (d_y - sum(y * d_y))``."""
    return apply_rows(gradient(), [y_RC, d_y_RC], config=config)[0][0]


def gradient() -> Formula:
    """Inputs y and d_y."""

    def fold(load: Load, vector: Load):
        del vector
        return (jnp.sum(load(0) * load(1), axis=1),)

    def join(parts: Parts, dot_P: jax.Array):
        return (parts.sum(dot_P),)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        del vector
        return (load(0) * (load(1) - totals[0]),), ()

    return Formula(
        name="softmax_gradient",
        fold=fold, merge=add, join=join, finish=finish, num_numbers=1, neutral=(0.0, 0.0)
    )  # fmt: skip


def log_softmax_gradient(
    x_RC: jax.Array, d_y_RC: jax.Array, *, config: RowConfig | None = None
) -> jax.Array:
    """``d_y - softmax(x) * sum(d_y)``; from x, because a logarithm in 16 bits is not exact."""
    return apply_rows(log_gradient(), [x_RC, d_y_RC], config=config)[0][0]


def log_gradient() -> Formula:
    """Inputs x and d_y."""
    softmaxed = forward(log=False, masked=False)

    def fold(load: Load, vector: Load):
        return *softmaxed.fold(load, vector), jnp.sum(load(1), axis=1)

    def merge(seen, columns, numbers_A, more_A):
        merged_A = softmaxed.merge(seen, columns, numbers_A[:2], more_A[:2])
        return *merged_A, numbers_A[2] + more_A[2]

    def join(parts: Parts, largest_P: jax.Array, sum_P: jax.Array, d_y_P: jax.Array):
        largest, factor = softmaxed.join(parts, largest_P, sum_P)
        return largest, factor * parts.sum(d_y_P)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        del vector
        return (load(1) - jnp.exp(load(0) - totals[0]) * totals[1],), ()

    return Formula(
        name="log_softmax_gradient",
        fold=fold, merge=merge, join=join, finish=finish, num_numbers=3, neutral=(-jnp.inf, 0.0)
    )  # fmt: skip
