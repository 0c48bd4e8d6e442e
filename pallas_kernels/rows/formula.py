"""What a kernel over rows computes, in whichever way the rows pass through a Hopper GPU.

A row is in parts, each in the registers of one warp. A formula folds a part into a few numbers,
joins the numbers of all parts into totals of the row, and finishes each part with these. One
formula serves ``blocks``, ``stream``, ``wide``, ``twice``, ``flat`` and ``odd``. The last two leave
columns out: parts then differ in size (``counts``).

Dims: A row or part that a warpgroup holds, M column of a part, P part of a row.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.machine import WARPS
from pallas_kernels.hopper.mosaic import plgpu

from .counts import Counted

MASK = jnp.dtype(jnp.int8)
"""Of masks: a byte an element; the GPU's kernels read no bool."""

type Load = Callable[[int], jax.Array]
"""Input or vector i as fp32 [A, M]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """How the numbers of a row's parts are brought together: along the last dim, P."""

    whole: bool  # rows in one part: nothing is brought together
    counts: jax.Array | None = None  # fp32 [P]: columns of each; None: all have as many
    near: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None
    """x [P] to one of its elements, as a total and [P], where that is sooner known than a mean."""
    all_sums: Callable[..., tuple[jax.Array, ...]] | None = None
    """Some [P] to the sum of each."""

    def sums(self, *xs: jax.Array) -> tuple[jax.Array, ...]:
        """[..., P] to [...], of each."""
        return tuple(map(self.sum, xs)) if self.all_sums is None else self.all_sums(*xs)

    def sum(self, x: jax.Array) -> jax.Array:
        """[..., P] to [...]."""
        return x if self.whole else jnp.sum(x, axis=-1)

    def max(self, x: jax.Array) -> jax.Array:
        """[..., P] to [...]."""
        return x if self.whole else jnp.max(x, axis=-1)

    def mean(self, columns: int, x: jax.Array) -> jax.Array:
        """[..., P] to [...], by columns."""
        if self.whole:
            return x
        if self.counts is None:
            return jnp.sum(x, axis=-1) * (1.0 / x.shape[-1])
        return jnp.sum(x * self.counts, axis=-1) * (1.0 / columns)

    def spread(self, total: jax.Array, x: jax.Array) -> jax.Array:
        """[...] to x's [..., P]."""
        return total if self.whole else lax.broadcast_in_dim(total, x.shape, range(total.ndim))

    def size(self, columns: int, x: jax.Array) -> int | jax.Array:
        """Columns of a part, or of each."""
        if self.whole:
            return columns
        return columns // x.shape[-1] if self.counts is None else self.counts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """A second turn over a row, for totals that need those of the first."""

    fold: Callable[..., tuple[jax.Array, ...]]
    """(inputs, vectors, totals [A, M]) to numbers of each part, [A] each."""
    merge: Callable[..., tuple[jax.Array, ...]]
    """(numbers of some tiles of a part, numbers of one more) to those of all, [A]."""
    join: Callable[..., tuple[jax.Array, ...]]
    """(parts, *numbers of all parts [..., P]) to more totals [...]."""
    num_numbers: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """What is done to a row."""

    name: str
    """Of its kernels in traces."""
    fold: Callable[[Load, Load], tuple[jax.Array, ...]]
    """(inputs, vectors) to numbers of each part, [A] each."""
    merge: Callable[..., tuple[jax.Array, ...]]
    """(columns of a part's tiles so far, columns of one more, numbers of the former, of the latter)
    to numbers of all, [A]. Columns are static or fp32 [A]."""
    join: Callable[..., tuple[jax.Array, ...]]
    """(parts, *numbers of all parts [..., P]) to totals [...]."""
    finish: Callable[..., tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]]
    """(inputs, vectors, totals [A, M]) to (results, what is summed over rows), [A, M] each."""
    num_numbers: int
    num_results: int = 1
    num_sums: int = 0
    again: Again | None = None
    """Its totals follow the first in ``finish``."""
    first_dtype: jnp.dtype | None = None
    """Of the first result; the others', and by default this one's, is the inputs'."""
    neutral: tuple[float, ...] | None = None
    """What each input would be in columns that do not count in ``fold``; None if nothing serves."""
    uneven: Callable[[Load, Load, Counted], tuple[jax.Array, ...]] | None = None
    """(inputs, vectors, what counts) to ``fold``'s numbers of the columns that count, where nothing
    is neutral; ``merge`` and ``join`` go by how many these are."""
    num_row_results: int = 0
    """How many of the last totals are results as well, fp32 [R], after the others."""

    @property
    def num_turns(self) -> int:
        """Over a row, before it is finished."""
        return 1 if self.again is None else 2

    @property
    def may_cut(self) -> bool:
        """Whether columns can be left out."""
        return self.neutral is not None or self.uneven is not None

    def fold_cut(self, load: Load, vector: Load, counted: Counted) -> tuple[jax.Array, ...]:
        """``fold`` of a tile in which some columns do not count."""
        if self.uneven is not None:
            return self.uneven(load, vector, counted)
        neutral = self.neutral
        assert neutral is not None, "columns that must not count have no value in this formula"
        return self.fold(lambda j: counted.own(load(j), neutral[j]), vector)

    def dtypes(self, dtype: jnp.dtype) -> tuple[jnp.dtype, ...]:
        """Of the results [R, C], by the inputs'."""
        return (self.first_dtype or dtype,) + (dtype,) * (self.num_results - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowCall:
    """What a kernel over rows reads, exchanges and sums."""

    columns: int
    dtype: jnp.dtype
    num_inputs: int  # arrays of [rows, columns] of ``dtype``
    num_masks: int = 0  # arrays of [rows, columns] of ``MASK``, after the inputs
    num_vectors: int = 0  # arrays of [columns], fp32
    num_numbers: int  # fp32, of each part of a row, that parts exchange
    num_sums: int = 0  # arrays of [columns] that it sums over rows, fp32
    num_turns: int = 1  # over a row, before it is finished
    over_inputs: bool = True  # results fit where inputs were
    may_cut: bool = False  # columns can be left out

    @classmethod
    def of(
        cls, formula: Formula, inputs_RC: Sequence[jax.Array], vectors_C: Sequence[jax.Array] = ()
    ) -> "RowCall":
        """A formula's, of arrays or their shapes."""
        dtypes = [jnp.dtype(x.dtype) for x in inputs_RC]
        num_masks = dtypes.count(MASK)
        call = cls(
            columns=inputs_RC[0].shape[1], dtype=dtypes[0],
            num_inputs=len(dtypes) - num_masks, num_masks=num_masks, num_vectors=len(vectors_C),
            num_numbers=formula.num_numbers, num_sums=formula.num_sums,
            num_turns=formula.num_turns,
            over_inputs=formula.first_dtype is None and not formula.num_row_results,
            may_cut=formula.may_cut,
        )  # fmt: skip
        assert dtypes == list(call.dtypes), f"{dtypes} are not of one dtype and then masks"
        return call

    @property
    def has_columns(self) -> bool:
        """Whether anything belongs to a column."""
        return self.num_vectors + self.num_sums > 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of an input that is no mask."""
        return self.dtype.itemsize

    @property
    def dtypes(self) -> tuple[jnp.dtype, ...]:
        """Of inputs and masks."""
        return (self.dtype,) * self.num_inputs + (MASK,) * self.num_masks

    @property
    def column_bytes(self) -> int:
        """Of all inputs and masks."""
        return sum(dtype.itemsize for dtype in self.dtypes)


def compiler_params(dtype: jnp.dtype, reduction_scratch_bytes: int) -> "plgpu.CompilerParams":
    """Of every form; ``dtype`` is the inputs'.

    Exponentials and roots to 2**-22, an instruction each, are enough for 16 bits alone.
    """
    return plgpu.CompilerParams(
        approx_math=jnp.dtype(dtype).itemsize == 2,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=reduction_scratch_bytes,
    )


def add(
    seen: int, columns: int, numbers_A: tuple[jax.Array, ...], more_A: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Merges numbers that are sums."""
    del seen, columns
    return tuple(map(jnp.add, numbers_A, more_A))


def to_columns(total: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A total of each row, [A] or a scalar, as [A, M]."""
    return lax.broadcast_in_dim(total, shape, range(total.ndim))


def to_parts(total: jax.Array, layout) -> jax.Array:
    """A total of each row, [A], or of the one row of a warpgroup, to [A]."""
    if total.ndim:
        return total
    return plgpu.layout_cast(lax.broadcast_in_dim(total, (WARPS,), ()), layout.reduce(1))
