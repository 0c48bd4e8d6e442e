"""Description of a paged attention call: its static part and its arrays.

Dims: B row, T query, N query heads, K kv heads, P page of the pool, S slot of a page, M page of a
row, H query and key width, V value width.

Position p of row b is in slot ``p % S`` of page ``tables_BM[b, p // S]``. The row holds positions 0
.. lengths_B[b] - 1, and the last ``query_lengths_B[b]`` of them are those of its queries. Other
slots, and table entries beyond a row's pages, affect no result.

Quantized pages have codes in place of elements, and a scale per slot and kv head; an element is
code times scale. With 4-bit codes, a byte has code d, plus 8, in its low bits and code d + H / 2,
plus 8, in its high bits.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_weight import WeightCode

CODES = {code.storage.name: code for code in (WeightCode.E4M3, WeightCode.INT8, WeightCode.INT4)}
"""Codes of quantized pages, by dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedSpec:
    """The static part of a paged attention call: scale, soft cap and window."""

    scale: float
    window: int | None = None  # most keys that a query sees, with its own position's
    soft_cap: float | None = None  # scores become cap * tanh(scale * q.k / cap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedCall:
    """A validated call of paged attention: its static part and its arrays."""

    q_BTNH: jax.Array
    k_PSKH: jax.Array
    v_PSKV: jax.Array
    k_scale_PSK: jax.Array | None = None  # of quantized pages, as is v_scale_PSK
    v_scale_PSK: jax.Array | None = None
    tables_BM: jax.Array  # int32
    lengths_B: jax.Array  # int32, clipped to ``capacity``
    query_lengths_B: jax.Array | None  # int32, clipped to T; None: T
    sinks_N: jax.Array | None  # float32: a logit that joins the softmax's denominator
    spec: PagedSpec = dataclasses.field(metadata=dict(static=True))

    @property
    def code(self) -> WeightCode | None:
        """Format of quantized pages; None where pages hold elements of the queries' dtype."""
        return None if self.k_scale_PSK is None else CODES[self.k_PSKH.dtype.name]

    @property
    def value_width(self) -> int:
        """Number of columns of a value."""
        return self.v_PSKV.shape[3] * (1 if self.code is None else 8 // self.code.bits)

    @property
    def group(self) -> int:
        """Number of query heads per kv head."""
        return self.q_BTNH.shape[2] // self.k_PSKH.shape[2]

    @property
    def size(self) -> int:
        """Number of slots of a page."""
        return self.k_PSKH.shape[1]

    @property
    def capacity(self) -> int:
        """Most positions in a row: slots of all pages in its table."""
        return self.tables_BM.shape[1] * self.k_PSKH.shape[1]

    def positions_BT(self) -> jax.Array:
        """Returns the position of each query in its row; below 0 for a query that sees nothing."""
        num_queries = self.q_BTNH.shape[1]
        t_1T = jnp.arange(num_queries, dtype=jnp.int32)[None, :]
        lengths_B1 = jnp.clip(self.lengths_B, 0, self.capacity)[:, None]
        if self.query_lengths_B is None:
            return lengths_B1 - num_queries + t_1T
        queries_B1 = jnp.clip(self.query_lengths_B, 0, num_queries)[:, None]
        return jnp.where(t_1T < queries_B1, lengths_B1 - queries_B1 + t_1T, -1)

    def visible(self, positions: jax.Array, keys: jax.Array) -> jax.Array:
        """Returns the mask of visible keys for query and key positions that broadcast."""
        visible = keys <= positions
        if self.spec.window is not None:
            visible &= keys > positions - self.spec.window
        return visible

    def describe(self) -> str:
        """Returns one line of shapes and options for logs and errors."""
        B, T, N, H = self.q_BTNH.shape
        num_pages, size, K, _ = self.k_PSKH.shape
        s, form = self.spec, "" if self.code is None else f"{self.code} "
        return (
            f"{self.q_BTNH.dtype} b{B} t{T} heads {N}/{K} width {H}/{self.value_width} {form}in "
            f"{num_pages} pages of {size}, window={s.window} cap={s.soft_cap} "
            f"sinks={self.sinks_N is not None}"
        )
