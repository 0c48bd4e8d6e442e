"""Norms whose result is e4m3 with one scale a row: the format, and the formula of the kernels.

Dims: R row, C column, A row or part of a row in a warpgroup, M column of a part, P part.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.e4m3 import E4M3, LARGEST, LEAST
from pallas_kernels.common.rounding import keep_rounded
from pallas_kernels.rows.formula import Again, Formula, Load, Parts

from . import formulas
from .formulas import NormForm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Rows:
    """``values * scale`` up to rounding: three bits of mantissa, down to 2**-15 of the largest."""

    values: jax.Array  # e4m3 [..., C]
    scale: jax.Array  # float32 [...]: largest |y| of the row / 448

    def dequantized(self) -> jax.Array:
        """Float32 [..., C]."""
        return self.values.astype(jnp.float32) * self.scale[..., None]


def to_fp8(y: jax.Array) -> Fp8Rows:
    """Rounds float32 [..., C]."""
    largest = jnp.max(jnp.abs(y), axis=-1)
    scale = jnp.maximum(largest, LEAST) / LARGEST
    return Fp8Rows(values=keep_rounded((y / scale[..., None]).astype(E4M3)), scale=scale)


def forward(norm: NormForm) -> Formula:
    """Inputs and vectors as in ``formulas.forward``; results values, x if it is a sum, scales.

    RMSNorm's largest element is the root times that of ``x * scale``, of the same turn over the
    row. LayerNorm's waits for the mean: a second turn.
    """
    exact = formulas.forward(norm)

    def result(load: Load, vector: Load, totals: list[jax.Array]) -> jax.Array:
        return exact.finish(load, vector, totals)[0][0]

    def scales(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The reciprocal scale, the scale."""
        bounded = jnp.maximum(largest, LEAST)
        return LARGEST / bounded, bounded * (1.0 / LARGEST)

    def finish(load: Load, vector: Load, totals: list[jax.Array]):
        *of_norm, reciprocal, _ = totals
        results, _ = exact.finish(load, vector, of_norm)
        return (results[0] * reciprocal, *results[1:]), ()

    def fold_scaled(load: Load, vector: Load):
        x = formulas.row(norm, load)
        return *exact.fold(load, vector), jnp.max(jnp.abs(x * vector(0)), axis=1)

    def merge_scaled(seen, columns, numbers_A, more_A):
        sums_A = exact.merge(seen, columns, numbers_A[:-1], more_A[:-1])
        return *sums_A, jnp.maximum(numbers_A[-1], more_A[-1])

    def join_scaled(parts: Parts, *numbers_P: jax.Array):
        (root,) = exact.join(parts, *numbers_P[:-1])
        return root, *scales(parts.max(numbers_P[-1]) * root)

    def fold_again(load: Load, vector: Load, totals: list[jax.Array]):
        return (jnp.max(jnp.abs(result(load, vector, totals)), axis=1),)

    def merge_again(numbers_A, more_A):
        return tuple(map(jnp.maximum, numbers_A, more_A))

    def join_again(parts: Parts, largest_P: jax.Array):
        return scales(parts.max(largest_P))

    first = dataclasses.replace(
        exact, finish=finish, first_dtype=jnp.dtype(E4M3), num_row_results=1
    )
    if norm.centered:
        again = Again(fold=fold_again, merge=merge_again, join=join_again, num_numbers=1)
        return dataclasses.replace(first, again=again)
    return dataclasses.replace(
        first, fold=fold_scaled, merge=merge_scaled, join=join_scaled,
        num_numbers=exact.num_numbers + 1,
    )  # fmt: skip
