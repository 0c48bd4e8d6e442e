"""RMSNorm and LayerNorm as formulas of the row kernel, forward and backward.

Dims: R row, C column, A row or part of a row in a warpgroup, M column of a part, P part.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows.config import RowConfig
from pallas_kernels.rows.formula import Formula, Load, Parts, Tile
from pallas_kernels.rows.kernel import apply_rows

type RowArrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NormForm:
    """The form of a norm: ``(x - mean) / sqrt(mean((x - mean)**2) + epsilon) * scale + bias``."""

    columns: int
    epsilon: float
    centered: bool = False  # LayerNorm; RMSNorm's mean and bias are 0
    biased: bool = False
    residual: bool = False  # x is the sum of two inputs, rounded to their dtype; it is a result too
    dtype: jnp.dtype = jnp.dtype(jnp.bfloat16)

    @property
    def name(self) -> str:
        """Name of the norm's kernels in profiler traces."""
        return "layer_norm" if self.centered else "rms_norm"


def hopper(
    norm: NormForm, inputs_RC: RowArrays, vectors_C: RowArrays, *, config: RowConfig | None = None
) -> RowArrays:
    """Computes the norm by the Hopper kernel: y in x's dtype, then x + residual if there is one."""
    return apply_rows(forward(norm), inputs_RC, vectors_C=vectors_C, config=config)[0]


def hopper_gradient(
    norm: NormForm, inputs_RC: RowArrays, scale_C: jax.Array, *, config: RowConfig | None = None
) -> RowArrays:
    """Computes the norm's gradients by the Hopper kernel: d_x in x's dtype, the rest in fp32."""
    results, sums = apply_rows(backward(norm), inputs_RC, vectors_C=[scale_C], config=config)
    return *results, *(jnp.sum(partials_NC, axis=0) for partials_NC in sums)


def forward(norm: NormForm) -> Formula:
    """Returns a norm's formula: maps x to y, or x and a residual to y and their sum.

    LayerNorm sums ``d = x - pivot``, since ``mean(x**2) - mean(x)**2`` would cancel:
    ``mean = pivot + sum(d) / C``, ``variance = sum(d**2) / C - (sum(d) / C)**2``.
    """

    def row(load: Load) -> jax.Array:
        if not norm.residual:
            return load(0)
        return (load(0) + load(1)).astype(norm.dtype).astype(jnp.float32)

    def fold(load: Load, vector: Load, tile: Tile):
        del vector
        x = tile.own(_apart(row(load), tile.pivot), 0.0)
        return tile.sums(*[x] * norm.centered, x * x)

    def join(parts: Parts, pivot: jax.Array | None, *numbers_P: jax.Array):
        *off, square = parts.sums(*numbers_P)
        mean, root = _mean_and_root(norm, off, square)
        return (root,) if pivot is None else (pivot + mean, root)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        x, root = row(load), totals[-1]
        # A multiply-add; mean * root is rounded as the mean was before.
        y = (x * root - totals[0] * root if norm.centered else x * root) * vector(0)
        if norm.biased:
            y += vector(1)
        return ((y, x) if norm.residual else (y,)), ()

    return Formula(
        name=norm.name, fold=fold, join=join, finish=finish,
        num_numbers=2 if norm.centered else 1,
        num_results=2 if norm.residual else 1,
        pivot=row if norm.centered else None,
        num_pivoted=1 + norm.residual,
    )  # fmt: skip


def backward(norm: NormForm) -> Formula:
    """Returns the formula of a norm's gradient: d_x, and the sums d_scale and d_bias.

    Inputs are x, d_y, the cotangent of x + residual if there is one, and the scale.

    With ``r`` the reciprocal root, ``n = (x - mean) * r`` and ``g = scale * d_y``:
    ``d_x = r * (g - mean(g) - n * mean(g * n))``, ``d_scale = sum_R(d_y * n)``,
    ``d_bias = sum_R(d_y)``; RMSNorm omits mean(x) and mean(g). Mean and root are recomputed, since
    x is read anyway.
    """

    def fold(load: Load, vector: Load, tile: Tile):
        x = tile.own(_apart(load(0), tile.pivot), 0.0)
        g = tile.own(load(1) * vector(0), 0.0)
        return tile.sums(*[x, g] * norm.centered, x * x, g * x)

    def join(parts: Parts, pivot: jax.Array | None, *numbers_P: jax.Array):
        *means, square, dot = parts.sums(*numbers_P)
        mean, root = _mean_and_root(norm, means[:1], square)
        per_column = 1.0 / norm.columns
        if pivot is None:
            return root, dot * root * root * root * per_column
        g = means[1]
        slope = (dot - mean * g) * root * root * root * per_column
        return pivot + mean, root, slope, g * root * per_column

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
        name=f"{norm.name}_gradient", fold=fold, join=join, finish=finish,
        num_numbers=4 if norm.centered else 2,
        num_sums=2 if norm.biased else 1,
        pivot=(lambda load: load(0)) if norm.centered else None,
    )  # fmt: skip


def _apart(x: jax.Array, pivot: jax.Array | None) -> jax.Array:
    return x if pivot is None else x - pivot


def _mean_and_root(
    norm: NormForm, off: list[jax.Array], square: jax.Array
) -> tuple[jax.Array | float, jax.Array]:
    """The mean's distance from the pivot, and the reciprocal root, of sums about the pivot."""
    square = square * (1.0 / norm.columns)
    if not off:
        return 0.0, lax.rsqrt(square + norm.epsilon)
    mean = off[0] * (1.0 / norm.columns)
    return mean, lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + norm.epsilon)
