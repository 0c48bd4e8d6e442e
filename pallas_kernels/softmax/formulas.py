"""Softmaxes and their gradients as formulas of the row kernel. Dims: A row or part, P part."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.rows.formula import Formula, Load, Parts, Tile, to_columns

LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(*, log: bool, masked: bool) -> Formula:
    """Returns the formula of a softmax or, if ``log``, of its logarithm.

    Inputs are x and, if masked, ``where`` as 1 or 0; ``log`` cannot be masked. One pass suffices,
    as each part of a row subtracts its own maximum (Milakov and Gimelshein 2018).
    """
    assert not (log and masked)

    def row(load: Load) -> jax.Array:
        return jnp.where(load(1) != 0.0, load(0), -jnp.inf) if masked else load(0)

    def fold(load: Load, vector: Load, tile: Tile):
        del vector
        x = tile.own(row(load), -jnp.inf)
        # A part that is all -inf, in a row that is not, must count as 0 and not as NaN.
        largest_A = jnp.maximum(jnp.max(x, axis=1), LOWEST)
        power = jnp.exp(x - to_columns(largest_A, x.shape))
        return largest_A, *tile.sums(power)

    def merge(numbers_A, more_A):
        largest_A = jnp.maximum(numbers_A[0], more_A[0])
        sums = [s * jnp.exp(m - largest_A) for m, s in (numbers_A, more_A)]
        return largest_A, sums[0] + sums[1]

    def join(parts: Parts, pivot: None, largest_P: jax.Array, sum_P: jax.Array):
        del pivot
        largest = parts.max(largest_P)
        lower_P = largest_P - (largest if parts.whole else to_columns(largest, largest_P.shape))
        (total,) = parts.sums(sum_P * jnp.exp(lower_P))
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
        fold=fold, merge=merge, join=join, finish=finish, num_numbers=2,
    )  # fmt: skip


def logsumexp() -> Formula:
    """Returns the formula of ``log(sum(exp(x)))``, one number per row."""
    softmaxed = forward(log=True, masked=False)

    def join(parts: Parts, pivot: None, *numbers_P: jax.Array):
        largest, total = softmaxed.join(parts, pivot, *numbers_P)
        return (largest + total,)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        del load, vector, totals
        return (), ()

    return dataclasses.replace(
        softmaxed, name="logsumexp", join=join, finish=finish, num_results=0, num_totals=1
    )


def gradient() -> Formula:
    """Returns the formula of a softmax's gradient: ``y * (d_y - sum(y * d_y))``."""

    def fold(load: Load, vector: Load, tile: Tile):
        del vector
        return tile.sums(tile.own(load(0) * load(1), 0.0))

    def join(parts: Parts, pivot: None, dot_P: jax.Array):
        del pivot
        return parts.sums(dot_P)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        del vector
        return (load(0) * (load(1) - totals[0]),), ()

    return Formula(
        name="softmax_gradient",
        fold=fold, join=join, finish=finish, num_numbers=1,
    )  # fmt: skip


def log_gradient() -> Formula:
    """Returns the formula of a log-softmax's gradient: ``d_y - softmax(x) * sum(d_y)``."""
    softmaxed = forward(log=False, masked=False)

    def fold(load: Load, vector: Load, tile: Tile):
        return *softmaxed.fold(load, vector, tile), *tile.sums(tile.own(load(1), 0.0))

    def merge(numbers_A, more_A):
        merged_A = softmaxed.merge(numbers_A[:2], more_A[:2])
        return *merged_A, numbers_A[2] + more_A[2]

    def join(parts: Parts, pivot: None, largest_P: jax.Array, sum_P: jax.Array, d_y_P: jax.Array):
        largest, factor = softmaxed.join(parts, pivot, largest_P, sum_P)
        (d_y,) = parts.sums(d_y_P)
        return largest, factor * d_y

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        del vector
        return (load(1) - jnp.exp(load(0) - totals[0]) * totals[1],), ()

    return Formula(
        name="log_softmax_gradient",
        fold=fold, merge=merge, join=join, finish=finish, num_numbers=3,
    )  # fmt: skip
