"""Weighted sums of each token's expert outputs: a gather in a fixed order, forward and backward.

The sum is not fused into the product, because different blocks compute the rows of one token. A
fused sum would need atomics, in an order that changes from run to run, or blocks that wait.

In the gradient, rows are also summed in a fixed order. The index is inverted once, so that every
element of the result gathers the rows that it sums.

Dims: M row, T token or result, J visit (one of the experts that a token is routed to), I entry of a
flat index (any token's visit), N width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.errors import InputError
from pallas_kernels.common.varying import vary_alike


def combine(
    y: jax.Array,
    positions: jax.Array,
    weights: jax.Array,
    *,
    inverse: jax.Array | None = None,
    is_pinned: bool = False,
) -> jax.Array:
    """Computes ``out[t] = sum_j weights[t, j] * y[positions[t, j]]`` in fp32, in the order of j.

    The result and the gradients of y and weights repeat bit for bit.

    Args:
        y: [M, N], floats.
        positions: int32 [T, J]: the row of each visit; one outside 0..M-1 (a dropped visit) adds 0.
        weights: float32 [T, J].
        inverse: int32 [M], ``inverse[positions[t, j]] == t * J + j``; outside 0..T*J-1 for a row
            that ``positions`` lacks. It saves a sort in the gradient, and is not checked: pass it
            only if ``positions`` has no row twice.
        is_pinned: whether no compiler may fuse a weighted row into the sum, or leave out the
            rounding of the result.

    Returns:
        [T, N] in y's dtype.

    Raises:
        InputError: shapes or dtypes that disagree.

    Examples:
        >>> y = jnp.array([[1.0], [10.0], [100.0]])
        >>> positions = jnp.array([[0, 1], [2, -1]])  # the second token's other visit was dropped
        >>> pallas_kernels.combine(y, positions, jnp.full((2, 2), 0.5)).tolist()
        [[5.5], [50.0]]
    """
    if y.ndim != 2 or not jnp.issubdtype(y.dtype, jnp.floating):
        raise InputError(f"y is {y.dtype}{list(y.shape)}; floats [M, N] are combined")
    if positions.ndim != 2 or positions.dtype != jnp.int32 or not positions.shape[1]:
        raise InputError(
            f"positions is {positions.dtype}{list(positions.shape)}; it must be int32 [T, J], the "
            "rows of each token"
        )
    if weights.shape != positions.shape or weights.dtype != jnp.float32:
        raise InputError(
            f"weights is {weights.dtype}{list(weights.shape)}; positions {list(positions.shape)} "
            "ask for as many float32"
        )
    if inverse is not None and (inverse.shape != y.shape[:1] or inverse.dtype != jnp.int32):
        raise InputError(
            f"inverse is {inverse.dtype}{list(inverse.shape)}; it must be int32 [{y.shape[0]}], an "
            "entry for each row of y"
        )
    return _combine(is_pinned, *vary_alike((y, positions, weights, inverse)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(
    is_pinned: bool,
    y_MN: jax.Array,
    positions_TJ: jax.Array,
    weights_TJ: jax.Array,
    inverse_M: jax.Array | None,
) -> jax.Array:
    del inverse_M
    parts = [
        weights_T[:, None] * take_rows(y_MN, positions_T)
        for positions_T, weights_T in zip(positions_TJ.T, weights_TJ.T, strict=True)
    ]
    if is_pinned:
        parts = [jnp.where(part == part, part, jnp.nan) for part in parts]
    total = sum(parts[1:], parts[0])
    if is_pinned and y_MN.dtype.itemsize < total.dtype.itemsize:
        kind = jnp.finfo(y_MN.dtype)
        total = lax.reduce_precision(total, kind.nexp, kind.nmant)
    return total.astype(y_MN.dtype)


def _combine_forward(is_pinned, y_MN, positions_TJ, weights_TJ, inverse_M):
    kept = (y_MN, positions_TJ, weights_TJ, inverse_M)
    return _combine(is_pinned, *kept), kept


def _combine_backward(is_pinned, kept, d_TN):
    del is_pinned
    y_MN, positions_TJ, weights_TJ, inverse_M = kept
    num_visits = positions_TJ.shape[1]

    def weighted(visits_M: jax.Array) -> jax.Array:
        is_visit_M = (visits_M >= 0) & (visits_M < weights_TJ.size)
        weights_M = weights_TJ.reshape(-1)[jnp.where(is_visit_M, visits_M, 0)]
        tokens_M = jnp.where(is_visit_M, visits_M // num_visits, -1)
        return weights_M[:, None] * take_rows(d_TN, tokens_M)

    if inverse_M is None:
        by_row = entries_by_result(positions_TJ.reshape(-1), num_results=y_MN.shape[0])
        d_y_MN = by_row.sum(weighted)
    else:
        d_y_MN = weighted(inverse_M)
    d_weights = [
        jnp.sum(take_rows(y_MN, positions_T) * d_TN.astype(jnp.float32), axis=1)
        for positions_T in positions_TJ.T
    ]
    return d_y_MN.astype(y_MN.dtype), None, jnp.stack(d_weights, axis=1), None


_combine.defvjp(_combine_forward, _combine_backward)


def take_rows(values_MN: jax.Array, rows_T: jax.Array) -> jax.Array:
    """Gathers the rows of given indices, fp32 [T, N]; an index outside 0..M-1 gives zeros."""
    is_row_T = (rows_T >= 0) & (rows_T < values_MN.shape[0])
    rows_TN = values_MN[jnp.where(is_row_T, rows_T, 0)].astype(jnp.float32)
    return jnp.where(is_row_T[:, None], rows_TN, 0.0)


class Entries(NamedTuple):
    """An inverted index: for each result t, the entries i with ``index[i] == t``."""

    order_I: jax.Array  # all entries, sorted by result, then ascending
    starts_T: jax.Array  # of each result's entries in ``order_I``
    counts_T: jax.Array  # number of each result's entries

    def nth(self, j: jax.Array | int) -> jax.Array:
        """Returns the j-th entry of each result, int32 [T]; -1 where a result has fewer."""
        at_T = jnp.clip(self.starts_T + j, 0, self.order_I.shape[0] - 1)
        return jnp.where(j < self.counts_T, self.order_I[at_T], -1)

    def sum(self, values_of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Sums the values of each result's entries in ascending order: fp32 [T, N].

        Round j adds every result's j-th entry. The rounds that equal numbers of entries would take
        are unrolled; a loop runs the others.

        Args:
            values_of: maps entries [T], where -1 is none, to values [T, N].
        """
        num_even = -(-self.order_I.shape[0] // self.counts_T.shape[0])
        sums_TN = values_of(self.nth(0))
        for j in range(1, num_even):
            sums_TN += values_of(self.nth(j))
        return lax.fori_loop(
            num_even, jnp.max(self.counts_T), lambda j, sums: sums + values_of(self.nth(j)), sums_TN
        )


def entries_by_result(index_I: jax.Array, *, num_results: int) -> Entries:
    """Groups the entries of an index by their result; skips those outside 0..num_results-1."""
    known_I = jnp.where((index_I >= 0) & (index_I < num_results), index_I, num_results)
    counts_T = jnp.zeros(num_results, jnp.int32).at[known_I].add(1, mode="drop")
    return Entries(
        order_I=jnp.argsort(known_I, stable=True).astype(jnp.int32),
        starts_T=jnp.cumsum(counts_T) - counts_T,
        counts_T=counts_T,
    )
