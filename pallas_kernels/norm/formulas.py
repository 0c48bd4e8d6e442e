"""Norms as formulas over rows, forward and backward.

Dims: R row, C column, A row or part of a row in a warpgroup, M column of a part, P part.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows.counts import ALL, Counted, share
from pallas_kernels.rows.formula import Formula, Load, Parts, add, to_columns

type RowArrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NormForm:
    """``(x - mean) / sqrt(mean((x - mean)**2) + epsilon) * scale + bias``."""

    columns: int
    epsilon: float
    centered: bool = False  # LayerNorm; RMSNorm's mean and bias are 0
    biased: bool = False
    residual: bool = False  # x is the sum of two inputs, rounded to their dtype; it is a result too
    dtype: jnp.dtype = jnp.dtype(jnp.bfloat16)

    @property
    def name(self) -> str:
        """Of its kernels in traces."""
        return "layer_norm" if self.centered else "rms_norm"


def row(norm: NormForm, load: Load) -> jax.Array:
    """x of the forward, fp32."""
    if not norm.residual:
        return load(0)
    return (load(0) + load(1)).astype(norm.dtype).astype(jnp.float32)


def forward(norm: NormForm) -> Formula:
    """Inputs x, or both addends of x; vectors scale and bias; results y, and x if it is a sum."""

    def fold(load: Load, vector: Load, counted: Counted = ALL):
        del vector
        x = row(norm, load)
        return _about_mean(x, counted)[:2] if norm.centered else (jnp.sum(x * x, axis=1),)

    def join(parts: Parts, *numbers_P: jax.Array):
        return _mean_and_root(norm, parts, *numbers_P)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        x, root = row(norm, load), totals[-1]
        # A multiply-add; mean * root is rounded as the mean was before.
        y = (x * root - totals[0] * root if norm.centered else x * root) * vector(0)
        if norm.biased:
            y += vector(1)
        return ((y, x) if norm.residual else (y,)), ()

    return Formula(
        name=norm.name,
        fold=fold, merge=_merge if norm.centered else add, join=join, finish=finish,
        num_numbers=2 if norm.centered else 1,
        num_results=2 if norm.residual else 1,
        neutral=None if norm.centered else (0.0, 0.0),
        uneven=fold if norm.centered else None,
    )  # fmt: skip


def backward(norm: NormForm) -> Formula:
    """Inputs x, d_y and, if x is a result too, its gradient; vector scale; result d_x; sums d_scale
    and d_bias.

    With ``r`` the reciprocal root, ``n = (x - mean) * r`` and ``g = scale * d_y``:
    ``d_x = r * (g - mean(g) - n * mean(g * n))``, ``d_scale = sum_R(d_y * n)``,
    ``d_bias = sum_R(d_y)``; RMSNorm has no means of x and g. Mean and root are computed again: x is
    read anyway.
    """

    def fold(load: Load, vector: Load, counted: Counted = ALL):
        x = load(0)
        g = counted.own(load(1)) * vector(0)
        if not norm.centered:
            return jnp.sum(x * x, axis=1), jnp.sum(g * x, axis=1)
        mean_A, square_A, apart = _about_mean(x, counted)
        return mean_A, square_A, jnp.sum(g, axis=1), jnp.sum(g * apart, axis=1)

    def join(parts: Parts, *numbers_P: jax.Array):
        if not norm.centered:
            square_P, dot_P = numbers_P
            (root,) = _mean_and_root(norm, parts, square_P)
            return root, parts.sum(dot_P) * root * root * root * (1.0 / norm.columns)
        mean_P, square_P, g_P, dot_P = numbers_P
        mean, root = _mean_and_root(norm, parts, mean_P, square_P)
        shift_P = mean_P - parts.spread(mean, mean_P)  # of the means that parts were taken against
        dot = parts.sum(dot_P + shift_P * g_P)
        per_column = 1.0 / norm.columns
        mean_g = parts.sum(g_P) * root * per_column
        return mean, root, dot * root * root * root * per_column, mean_g

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        x, d_y = load(0), load(1)
        if norm.centered:
            mean, root, slope, mean_g = totals
            x = x - mean
            d_x = d_y * root * vector(0) - (x * slope + mean_g)
        else:
            root, slope = totals
            d_x = d_y * root * vector(0) - x * slope
        if norm.residual:
            d_x += load(2)
        sums = (d_y * root * x, d_y) if norm.biased else (d_y * root * x,)
        return (d_x,), sums

    return Formula(
        name=f"{norm.name}_gradient",
        fold=fold, merge=_merge if norm.centered else add, join=join, finish=finish,
        num_numbers=4 if norm.centered else 2,
        num_sums=2 if norm.biased else 1,
        neutral=None if norm.centered else (0.0, 0.0, 0.0),
        uneven=fold if norm.centered else None,
    )  # fmt: skip


def _about_mean(x: jax.Array, counted: Counted) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each part: its own mean [A], the sum of squares about that [A], what is squared [A, M]."""
    mean_A = counted.mean(x)
    apart = counted.own(x - to_columns(mean_A, x.shape))
    return mean_A, jnp.sum(apart * apart, axis=1), apart


def _merge(seen, columns, numbers_A, more_A):
    """Chan, Golub and LeVeque's update (1979), and for the gradient that of its two sums."""
    apart, part = more_A[0] - numbers_A[0], share(columns, seen)
    mean_A = numbers_A[0] + apart * part
    square_A = numbers_A[1] + more_A[1] + apart * apart * (seen * part)
    if len(numbers_A) == 2:
        return mean_A, square_A
    shifts = numbers_A[0] - mean_A, more_A[0] - mean_A
    dots = [n[3] + shift * n[2] for n, shift in zip((numbers_A, more_A), shifts, strict=True)]
    return mean_A, square_A, numbers_A[2] + more_A[2], dots[0] + dots[1]


def _mean_and_root(norm: NormForm, parts: Parts, *numbers_P: jax.Array) -> tuple[jax.Array, ...]:
    """Of the row; RMSNorm has no mean. Parts are joined as tiles are merged."""
    if not norm.centered:
        (square_P,) = numbers_P
        return (lax.rsqrt(parts.sum(square_P) * (1.0 / norm.columns) + norm.epsilon),)
    mean_P, square_P = numbers_P
    mean = parts.mean(norm.columns, mean_P)
    apart_P = mean_P - parts.spread(mean, mean_P)
    square = parts.sum(square_P + apart_P * apart_P * parts.size(norm.columns, mean_P))
    return mean, lax.rsqrt(square * (1.0 / norm.columns) + norm.epsilon)
