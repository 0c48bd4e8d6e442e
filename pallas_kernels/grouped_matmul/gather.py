"""Sums of rows that an index names, in an order that does not change: no atomic additions.

An index is turned round once, so that every result reads the rows that it is the sum of.

Dims: I entry of the index, T result, J entry of a result, M row, N width.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def take_rows(values_MN: jax.Array, rows_T: jax.Array) -> jax.Array:
    """fp32 [T, N]: the rows named, 0 for one outside 0..M-1."""
    is_row_T = (rows_T >= 0) & (rows_T < values_MN.shape[0])
    rows_TN = values_MN[jnp.where(is_row_T, rows_T, 0)].astype(jnp.float32)
    return jnp.where(is_row_T[:, None], rows_TN, 0.0)


class Entries(NamedTuple):
    """The entries of an index, by what they name."""

    order_I: jax.Array  # sorted by what they name, then by place
    starts_T: jax.Array
    counts_T: jax.Array

    def nth(self, j: jax.Array | int) -> jax.Array:
        """int32 [T]: each result's entry number j, -1 where it has fewer."""
        at_T = jnp.clip(self.starts_T + j, 0, self.order_I.shape[0] - 1)
        return jnp.where(j < self.counts_T, self.order_I[at_T], -1)

    def sum(self, values_of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """fp32 [T, N]: the values of each result's entries, added in their order.

        As many rounds as the commonest result has entries. Those that an even spread needs are
        unrolled; a loop has the rest, none where the spread is even.

        Args:
            values_of: from entries [T], -1 for none, to values [T, N].
        """
        num_even = -(-self.order_I.shape[0] // self.counts_T.shape[0])
        sums_TN = values_of(self.nth(0))
        for j in range(1, num_even):
            sums_TN += values_of(self.nth(j))
        return lax.fori_loop(
            num_even, jnp.max(self.counts_T), lambda j, sums: sums + values_of(self.nth(j)), sums_TN
        )


def entries_by_result(index_I: jax.Array, *, num_results: int) -> Entries:
    """Turns an index round; entries outside 0..num_results-1 are left out."""
    known_I = jnp.where((index_I >= 0) & (index_I < num_results), index_I, num_results)
    counts_T = jnp.zeros(num_results, jnp.int32).at[known_I].add(1, mode="drop")
    return Entries(
        order_I=jnp.argsort(known_I, stable=True).astype(jnp.int32),
        starts_T=jnp.cumsum(counts_T) - counts_T,
        counts_T=counts_T,
    )
