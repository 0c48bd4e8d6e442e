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
        return _about_mean(x, counted) if norm.centered else counted.sums(x * x)

    def join(parts: Parts, *numbers_P: jax.Array):
        if norm.centered:
            mean, square = _joined(norm, parts, *numbers_P)
            return mean, _root(norm, square)
        return (_root(norm, *parts.sums(*numbers_P)),)

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
        return _about_mean(x, counted, g) if norm.centered else counted.sums(x * x, g * x)

    def join(parts: Parts, *numbers_P: jax.Array):
        if not norm.centered:
            square, dot = parts.sums(*numbers_P)
            root = _root(norm, square)
            return root, dot * root * root * root * (1.0 / norm.columns)
        mean, square, g, dot = _joined(norm, parts, *numbers_P)
        root, per_column = _root(norm, square), 1.0 / norm.columns
        return mean, root, dot * root * root * root * per_column, g * root * per_column

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


def _about_mean(x: jax.Array, counted: Counted, *weights: jax.Array) -> RowArrays:
    """Of each part its own mean, the sum of squares about that, and of each weight its sum and that
    of its products with what x is apart from the mean. [A] each; weights are 0 in columns that do
    not count.

    The mean of some columns serves as well, as what everything is taken against: a part's squares
    sum to at least what these columns add to them, so where one column of n is taken, what cancels
    is at most n times the result.
    """
    if counted.near is None:
        middle_A = counted.mean(x)
        middle = to_columns(middle_A, x.shape)
    else:
        middle_A, middle = counted.near(x)
    apart = counted.own(x - middle)
    terms = apart * apart, *weights, *(weight * apart for weight in weights)
    if counted.near is None:
        return middle_A, *counted.sums(*terms)
    off_A, *found = counted.sums(apart, *terms)
    return _about(middle_A, off_A, off_A * (1.0 / counted.size(x)), found)


def _about(middle, off, step, sums) -> RowArrays:
    """Mean and sums about it.

    Args:
        middle: what sums were taken against.
        off, step: the sum of what x is apart from that, and the mean.
        sums: of squares, weights, and products with weights.
    """
    square, *others = sums
    weights, dots = others[: len(others) // 2], others[len(others) // 2 :]
    dots = [dot - step * weight for dot, weight in zip(dots, weights, strict=True)]
    return middle + step, jnp.maximum(square - off * step, 0.0), *weights, *dots


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


def _joined(norm: NormForm, parts: Parts, *numbers_P: jax.Array) -> RowArrays:
    """Of the row, from numbers of its parts; parts are joined as tiles are merged."""
    mean_P, square_P, *others_P = numbers_P
    if parts.near is None:
        middle = parts.mean(norm.columns, mean_P)
        off_P = mean_P - parts.spread(middle, mean_P)
    else:
        middle, middle_P = parts.near(mean_P)
        off_P = mean_P - middle_P
    sums_P = off_P * parts.size(norm.columns, mean_P)
    weights_P, dots_P = others_P[: len(others_P) // 2], others_P[len(others_P) // 2 :]
    dots_P = [dot + off_P * weight for dot, weight in zip(dots_P, weights_P, strict=True)]
    terms = square_P + off_P * sums_P, *weights_P, *dots_P
    if parts.near is None:
        return middle, *parts.sums(*terms)
    off, *found = parts.sums(sums_P, *terms)
    return _about(middle, off, off * (1.0 / norm.columns), found)


def _root(norm: NormForm, square: jax.Array) -> jax.Array:
    """The reciprocal one, of a row's sum of squares."""
    return lax.rsqrt(square * (1.0 / norm.columns) + norm.epsilon)
