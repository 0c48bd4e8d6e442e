"""The formulas, such as a softmax's or a norm's, that the kernel over rows computes.

A row is split into parts, each in the registers of one warp. A formula reduces a part to a few
numbers (fold), combines the numbers of all parts into the row's totals (join), and computes each
part's results from these (finish).

Dims: R row, C column, A row or part that a warpgroup holds, M column of a part, P part of a row.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

MASK = jnp.dtype(jnp.int8)
"""Dtype of masks, one byte per element, as the kernel cannot read bool."""

type Load = Callable[[int], jax.Array]
"""Function that loads input or vector i as fp32 [A, M]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Helper functions and the pivot, which ``Formula.fold`` gets with the inputs and vectors."""

    own: Callable[[jax.Array, float], jax.Array]
    """Maps (x [A, M], fill) to x in the row's own columns, and fill in a neighboring row's."""
    sums: Callable[..., tuple[jax.Array, ...]]
    """Sums several [A, M] over their columns, to [A] each."""
    pivot: jax.Array | None = None  # [A, M], if the formula asks for one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Reductions over the parts of a row, [..., P] to [...]; no-ops for a row in one part."""

    whole: bool
    sums: Callable[..., tuple[jax.Array, ...]]
    """Sums several [..., P] over all parts, to [...] each."""

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the largest of all parts' values."""
        return x if self.whole else jnp.max(x, axis=-1)


def add(numbers_A: tuple[jax.Array, ...], more_A: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Merges two partial results of a fold by adding them number by number."""
    return tuple(map(jnp.add, numbers_A, more_A))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """A computation on each row, with optional sums over all rows per column."""

    name: str
    """Name of the kernel in profiler traces."""
    fold: Callable[[Load, Load, Tile], tuple[jax.Array, ...]]
    """Maps (inputs, vectors, tile) to a few numbers per part, [A] each."""
    join: Callable[..., tuple[jax.Array, ...]]
    """Maps (parts, pivot [...], *numbers of all parts [..., P]) to totals [...]."""
    finish: Callable[..., tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]]
    """Maps (inputs, vectors, totals [A, M]) to (results, addends of row sums), [A, M] each."""
    num_numbers: int
    merge: Callable[..., tuple[jax.Array, ...]] = add
    """Merges numbers of two sets of a part's columns into numbers of both, [A] each."""
    num_results: int = 1
    num_totals: int = 0
    """Number of leading totals that are results, one per row."""
    num_sums: int = 0
    pivot: Callable[[Load], jax.Array] | None = None
    """Maps inputs to a value per row, which sums subtract from elements to avoid cancellation."""
    num_pivoted: int = 1  # first inputs that ``pivot`` reads


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowCall:
    """Counts and dtypes of a row-kernel call's inputs, exchanged numbers and sums."""

    columns: int
    dtype: jnp.dtype
    num_inputs: int  # arrays of [rows, columns] of ``dtype``
    num_masks: int = 0  # arrays of [rows, columns] of ``MASK``, after the inputs
    num_vectors: int = 0  # arrays of [columns], fp32
    num_numbers: int  # fp32 numbers per part of a row, exchanged between parts
    num_sums: int = 0  # arrays of [columns] that are sums over rows, fp32

    @classmethod
    def of(
        cls, formula: Formula, inputs_RC: Sequence[jax.Array], vectors_C: Sequence[jax.Array] = ()
    ) -> "RowCall":
        """Returns the counts and dtypes for a formula, given the arrays or their shapes."""
        dtypes = [jnp.dtype(x.dtype) for x in inputs_RC]
        num_masks = dtypes.count(MASK)
        call = cls(
            columns=inputs_RC[0].shape[1], dtype=dtypes[0],
            num_inputs=len(dtypes) - num_masks, num_masks=num_masks, num_vectors=len(vectors_C),
            num_numbers=formula.num_numbers, num_sums=formula.num_sums,
        )  # fmt: skip
        assert dtypes == list(call.dtypes), f"{dtypes} are not of one dtype and then masks"
        return call

    @property
    def word(self) -> int:
        """Number of input elements in 16 bytes, the unit of bulk copies."""
        return 16 // self.dtype.itemsize

    @property
    def dtypes(self) -> tuple[jnp.dtype, ...]:
        """Dtypes of all inputs, and then of the masks."""
        return (self.dtype,) * self.num_inputs + (MASK,) * self.num_masks


def to_columns(total: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per row, [A] or a scalar, to [A, M]."""
    return jax.lax.broadcast_in_dim(total, shape, range(total.ndim))
