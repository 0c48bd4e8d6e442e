"""KV cache operations: storage formats, appending to pages, and attention to cached tokens.

On a Hopper GPU, kernels read caches in place (``pallas_kernels.paged_attention``). They read a
contiguous cache as consecutive pages, and dequantize a quantized one themselves. Elsewhere the keys
of a layer's rows are first gathered into one array.

Dims: B batch, T query, S key, N query heads, K key/value heads, G query heads per key/value head,
H head width, R width of a latent; P page, M page of a row.

"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

import pallas_kernels
from jaxinfra.config.cache import SCALE, CacheFormat
from jaxinfra.config.latent import IndexerConfig
from jaxinfra.config.model import GroupedAttentionConfig, LatentAttentionConfig, MixerConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.attention import distance_slopes, own_attention, own_function
from jaxinfra.ops.key_choice import KeyIndex, best_keys, chosen_keys
from jaxinfra.ops.multiply import multiply
from jaxinfra.ops.query_blocks import in_query_blocks
from pallas_kernels.common import device
from pallas_kernels.paged_attention import PagedImplementation, attends_chunk, codes_of, numbers_of
from pallas_kernels.quantized_weight import WeightCode

_CODES = {
    CacheFormat.FP8: WeightCode.E4M3,
    CacheFormat.INT8: WeightCode.INT8,
    CacheFormat.INT4: WeightCode.INT4,
}


def storage(form: CacheFormat, compute: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of a cache's elements in a format; scales are in ``compute``."""
    return compute if form is CacheFormat.PLAIN else _CODES[form].storage


def stored_tokens(
    x: Float[Array, "*rows H"], form: CacheFormat, scale_dtype: jnp.dtype
) -> tuple[Shaped[Array, "*rows _"], Float[Array, "*rows"]]:
    """Quantizes x to a cache's format: codes and a scale per row, whose product is close to x.

    In a 4-bit format, a byte has an element of the head's first half in its low bits and one of the
    second half in its high bits.
    """
    return codes_of(x, _CODES[form], scale_dtype)


def read_tokens(
    codes: Shaped[Array, "*rows _"],
    scales: Float[Array, "*rows"],
    form: CacheFormat,
    dtype: jnp.dtype,
) -> Float[Array, "*rows H"]:
    """Dequantizes cached tokens, rounding once to ``dtype``."""
    return numbers_of(codes, scales, _CODES[form], dtype)


def as_cached(x: Float[Array, "*rows H"], form: CacheFormat) -> Float[Array, "*rows H"]:
    """Rounds x to the values that a read from the cache would return."""
    if form is CacheFormat.PLAIN:
        return x
    return read_tokens(*stored_tokens(x, form, x.dtype), form, x.dtype)


_PAGE, _LEAST_PAGE = 64, 16  # slots of a page that a contiguous cache is cut into


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """View of one layer's KV cache, from which attention reads without a copy.

    With tables, position p of row b is slot ``p % size`` of page ``tables_BM[b, p // size]`` of a
    pool. Without tables, it is slot p of row b, in layer ``layer`` of a contiguous cache.
    """

    # By the names of the mixer's CacheSpec, [P, size, ...] each; [L, B, slots, ...] without tables.
    arrays: dict[str, jax.Array]
    # int32, 0..P-1 for a row's pages. A NumPy array becomes a constant of the program.
    tables_BM: jax.Array | np.ndarray | None = None
    layer: jax.Array | np.ndarray | None = None  # int32, only without tables
    format: CacheFormat = dataclasses.field(default=CacheFormat.PLAIN, metadata=dict(static=True))

    def only(self, *names: str) -> "Pages":
        """Returns the view with these arrays of the CacheSpec alone."""
        kept = {n: x for n, x in self.arrays.items() if n.removesuffix(SCALE) in names}
        return dataclasses.replace(self, arrays=kept)

    def tokens(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """Returns the cached arrays in position order, dequantized to ``dtype`` if quantized."""
        return self._dequantized(self.rows(), dtype)

    def tokens_at(self, slot_BK: jax.Array, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """Returns the tokens [B, K, ...] in these slots of each row, dequantized as ``tokens``."""
        if self.tables_BM is None:
            rows_B1 = jnp.arange(len(slot_BK))[:, None]
            found = {name: x[self.layer, rows_B1, slot_BK] for name, x in self.arrays.items()}
            return self._dequantized(found, dtype)
        place_BK, slot_BK = jnp.divmod(slot_BK, next(iter(self.arrays.values())).shape[1])
        page_BK = jnp.take_along_axis(jnp.asarray(self.tables_BM), place_BK, axis=1)
        found = {name: pages[page_BK, slot_BK] for name, pages in self.arrays.items()}
        return self._dequantized(found, dtype)

    def _dequantized(self, rows: dict[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
        if self.format is CacheFormat.PLAIN:
            return rows
        return {
            name: read_tokens(codes, rows[name + SCALE], self.format, dtype)
            for name, codes in rows.items()
            if not name.endswith(SCALE)
        }

    def rows(self) -> dict[str, jax.Array]:
        """Returns the cached arrays as stored, gathered in the order of positions: [B, S, ...]."""
        tables_BM = self.tables_BM
        if tables_BM is None:
            return {
                name: jax.lax.dynamic_index_in_dim(stored, self.layer, keepdims=False)
                for name, stored in self.arrays.items()
            }

        def gathered(pages: jax.Array) -> jax.Array:
            batch, num_pages = tables_BM.shape
            return pages[tables_BM].reshape(batch, num_pages * pages.shape[1], *pages.shape[2:])

        return {name: gathered(pages) for name, pages in self.arrays.items()}

    @property
    def can_be_paged(self) -> bool:
        """Whether rows are in pages, or their slots can be divided into pages for the kernels."""
        return self.tables_BM is not None or self._num_slots % _LEAST_PAGE == 0

    def paged(self) -> "Pages":
        """Returns a view of contiguous rows as pages, with tables of consecutive page numbers."""
        if self.tables_BM is not None:
            return self
        assert self.layer is not None, "in_layer"
        size = math.gcd(self._num_slots, _PAGE)
        num_layers, batch = next(iter(self.arrays.values())).shape[:2]
        per_row = self._num_slots // size
        rows_B = self.layer * batch + np.arange(batch, dtype=np.int32)
        num_pages = num_layers * batch * per_row
        return Pages(
            arrays={
                name: stored.reshape(num_pages, size, *stored.shape[3:])
                for name, stored in self.arrays.items()
            },
            tables_BM=rows_B[:, None] * per_row + np.arange(per_row, dtype=np.int32)[None, :],
            format=self.format,
        )

    @property
    def row_slots(self) -> int:
        """Number of tokens of a row that the view has slots for."""
        if self.tables_BM is None:
            return self._num_slots
        return self.tables_BM.shape[1] * next(iter(self.arrays.values())).shape[1]

    @property
    def _num_slots(self) -> int:
        return next(iter(self.arrays.values())).shape[2]


def cached_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    *,
    config: MixerConfig,
    positions_BT: jax.Array,
    sinks_N: jax.Array | None = None,
    index: KeyIndex | None = None,
) -> jax.Array:
    """Computes attention of new queries to all cached keys, including their own.

    Query t of row b sees positions ``positions_BT[b, t] - window < s <= positions_BT[b, t]``; slots
    of other positions may have any finite values. A query at a position below 0 is padding: its
    result is 0. A row's positions are consecutive, with padding to their right. Scores and softmax
    are fp32. Queries are processed 128 at a time, so memory is linear in the number of keys.

    The cache of latent attention has latents and rotated keys, which all heads share. A key is the
    two concatenated, a value is the latent. A sink is a logit in a head's softmax without a value.

    Returns [B, T, N, H] in q's dtype; for latent attention [B, T, N, R].

    Args:
        index: of an indexer, whose ``top_k`` keys are all that a query attends to. It chooses among
            all cached index keys of the row. A few queries then read the latents of their keys
            alone; of more queries, all scores are computed and those of other keys left out.
    """
    if own_function(config) is not None:
        rows = pages.tokens(q_BTNH.dtype)
        slots_S = jnp.arange(rows["k"].shape[1], dtype=jnp.int32)
        distance_BTS = positions_BT[:, :, None] - slots_S[None, None, :]
        # Padding sees the first key, so that no softmax is of nothing; nobody reads its result.
        mask_BTS = jnp.maximum(positions_BT, 0)[:, :, None] >= slots_S[None, None, :]
        return own_attention(q_BTNH, rows["k"], rows["v"], config, mask_BTS, distance_BTS)
    # A latent cache is two arrays, and the kernels read keys from one.
    in_kernels = isinstance(config, GroupedAttentionConfig) and not (
        config.chunk or config.distance_slopes
    )
    if pages.can_be_paged and in_kernels and device.target().capability == (9, 0):
        return paged_attention(
            q_BTNH, pages, config=config, positions_BT=positions_BT, sinks_N=sinks_N
        )
    if isinstance(config, LatentAttentionConfig) and config.indexer is not None:
        assert index is not None, "LatentAttention"
        if reads_chosen(config.indexer, positions_BT.shape[1], pages.row_slots):
            return _attend_to_chosen(q_BTNH, pages, index, config, positions_BT)
    rows = pages.tokens(q_BTNH.dtype)
    if isinstance(config, LatentAttentionConfig):
        latent_BS1R, rotated_BS1P = (rows[n][:, :, None] for n in ("latent", "rotated_key"))
        keys, v_BSKH = (latent_BS1R, rotated_BS1P), latent_BS1R
    else:
        keys, v_BSKH = (rows["k"],), rows["v"]
    attend = functools.partial(
        _attend,
        keys=keys,
        v_BSKH=v_BSKH,
        config=config,
        sinks_N=sinks_N,
        index_key_BSJ=rows.get("index_key"),
    )
    return in_query_blocks(lambda block: attend(*block), (q_BTNH, positions_BT, index))


def reads_chosen(indexer: IndexerConfig, num_queries: int, num_slots: int) -> bool:
    """Whether queries read the keys that they chose, which are fewer than those of the row."""
    return num_queries * indexer.top_k < num_slots


def _attend_to_chosen(
    q_BTNH: jax.Array,
    pages: Pages,
    index: KeyIndex,
    config: LatentAttentionConfig,
    positions_BT: jax.Array,
) -> jax.Array:
    """Attention of each query to its chosen latents, as if it were a row of them alone."""
    assert config.indexer is not None, "by the caller"
    (batch, length), top_k = positions_BT.shape, config.indexer.top_k
    key_BSJ = pages.only("index_key").tokens(q_BTNH.dtype)["index_key"]
    visible_BTS = positions_BT[:, :, None] >= jnp.arange(key_BSJ.shape[1])[None, None, :]
    slot_BTK = best_keys(index, key_BSJ, visible_BTS, top_k=top_k)
    read = pages.only("latent", "rotated_key").tokens_at(slot_BTK.reshape(batch, -1), q_BTNH.dtype)
    latent_RK1, rotated_RK1 = (
        read[name].reshape(batch * length, top_k, 1, -1) for name in ("latent", "rotated_key")
    )
    out_R1NH = _attend(
        q_BTNH.reshape(batch * length, 1, *q_BTNH.shape[2:]),
        # The visible ones come first.
        jnp.minimum(positions_BT, top_k - 1).reshape(-1, 1),
        None,
        keys=(latent_RK1, rotated_RK1),
        v_BSKH=latent_RK1,
        config=dataclasses.replace(config, indexer=None),
        sinks_N=None,
        index_key_BSJ=None,
    )
    return out_R1NH.reshape(batch, length, *out_R1NH.shape[2:])


def paged_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    *,
    config: MixerConfig,
    positions_BT: jax.Array,
    sinks_N: jax.Array | None = None,
    implementation: PagedImplementation = "auto",
    is_ordered: bool = False,
) -> jax.Array:
    """Computes ``cached_attention`` by kernels that read pages in place, without gathering them.

    Args:
        implementation: "auto" uses the kernels if they support the call, and logs its choice.
        is_ordered: add keys in the order of ``ops.attention`` on a Hopper GPU.

    Raises:
        UnsupportedError: ``is_ordered`` of a call that has no such kernel.
    """
    pages = pages.paged()
    assert pages.tables_BM is not None
    compute = functools.partial(
        pallas_kernels.paged_attention,
        q_BTNH,
        pages.arrays["k"],
        pages.arrays["v"],
        pages.tables_BM,
        jnp.max(positions_BT, axis=1) + 1,
        k_scale=pages.arrays.get("k" + SCALE),
        v_scale=pages.arrays.get("v" + SCALE),
        query_lengths=None if positions_BT.shape[1] == 1 else jnp.sum(positions_BT >= 0, axis=1),
        window=config.window,
        soft_cap=config.logit_soft_cap,
        sinks=sinks_N,
        scale=config.scale,
        implementation=implementation,
        is_ordered=is_ordered,
    )
    try:
        return compute()
    except pallas_kernels.UnsupportedError as error:
        raise UnsupportedError(str(error)) from error


def _attend(
    q_BTNH: jax.Array,
    positions_BT: jax.Array,
    index: KeyIndex | None,
    *,
    keys: tuple[jax.Array, ...],  # [B, S, K, H], or parts of that width
    v_BSKH: jax.Array,
    config: MixerConfig,
    sinks_N: jax.Array | None,
    index_key_BSJ: jax.Array | None,
) -> jax.Array:
    batch, length, num_q_heads, head_dim = q_BTNH.shape
    num_slots, num_kv_heads = v_BSKH.shape[1:3]
    fp32 = jnp.dtype("float32")
    dot = functools.partial(multiply, recipe=Recipe(compute=q_BTNH.dtype, accum=fp32))
    q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    ends = list(itertools.accumulate(k_BSKH.shape[-1] for k_BSKH in keys))
    parts = zip(jnp.split(q_BTKGH, ends[:-1], axis=-1), keys, strict=True)
    products = (dot("BTKGH,BSKH->BKGTS", *part, out=fp32) for part in parts)
    scores_BKGTS = scale * functools.reduce(jnp.add, products)
    if config.logit_soft_cap is not None:
        cap = config.logit_soft_cap
        scores_BKGTS = cap * jnp.tanh(scores_BKGTS / cap)
    slots_S = jnp.arange(num_slots)
    age_BTS = positions_BT[:, :, None] - slots_S[None, None, :]
    slopes_N = distance_slopes(config, num_q_heads)
    if slopes_N is not None:
        slopes_1KG11 = slopes_N.reshape(1, num_kv_heads, -1, 1, 1)
        scores_BKGTS = scores_BKGTS - slopes_1KG11 * age_BTS[:, None, None].astype(fp32)
    visible_BTS = age_BTS >= 0
    if config.window is not None:
        visible_BTS &= age_BTS < config.window
    chunk = config.chunk if isinstance(config, GroupedAttentionConfig) else None
    if chunk is not None:
        visible_BTS &= (slots_S // chunk)[None, None, :] == (positions_BT // chunk)[:, :, None]
    if isinstance(config, LatentAttentionConfig) and config.indexer is not None:
        assert index is not None, "LatentAttention"
        assert index_key_BSJ is not None, "CacheSpec"
        top_k = config.indexer.top_k
        visible_BTS = chosen_keys(index, index_key_BSJ, visible_BTS, top_k=top_k)
    visible_B11TS = visible_BTS[:, None, None]
    if sinks_N is None:
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1, where=visible_B11TS)
    else:
        weights_BKGTS = _softmax_with_sinks(scores_BKGTS, visible_B11TS, sinks_N)
    out_BTKGH = dot("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return out_BTKGH.reshape(batch, length, num_q_heads, -1)


def _softmax_with_sinks(
    scores_BKGTS: jax.Array, visible_B11TS: jax.Array, sinks_N: jax.Array
) -> jax.Array:
    """Weights of the visible keys, whose sum the sink's share is missing from."""
    num_kv_heads, group = scores_BKGTS.shape[1:3]
    sinks_1KG11 = sinks_N.reshape(1, num_kv_heads, group, 1, 1).astype(scores_BKGTS.dtype)
    seen_BKGTS = jnp.where(visible_B11TS, scores_BKGTS, -jnp.inf)
    largest_BKGT1 = jnp.maximum(jnp.max(seen_BKGTS, axis=-1, keepdims=True), sinks_1KG11)
    weights_BKGTS = jnp.exp(seen_BKGTS - largest_BKGT1)
    total_BKGT1 = jnp.sum(weights_BKGTS, axis=-1, keepdims=True)
    return weights_BKGTS / (total_BKGT1 + jnp.exp(sinks_1KG11 - largest_BKGT1))


def append_packed_heads(
    heads_BTNH: jax.Array,
    pages: Pages,
    *,
    config: MixerConfig,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    is_empty: bool,
    is_ordered: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]] | None:
    """Rotates packed q, k, v heads (RoPE) and appends k, v to pages in one Hopper kernel.

    Returns q and the pools, or None if the kernel does not support the call.

    Args:
        is_ordered: rotate as ``apply_rope`` does with exact numerics.
    """
    # On a Hopper GPU, where heads turn whole.
    if (
        rope is None
        or pages.tables_BM is None
        or not isinstance(config, GroupedAttentionConfig)
        or config.qk_norm is not None
        or config.value_norm is not None
        or config.qkv_clip is not None
        or config.query_scaling is not None
        or config.out_gate
        or config.rope is None
        or config.rope.pairs is not RopePairs.HALVES
        or 2 * rope[0].shape[-1] != heads_BTNH.shape[-1]
        or device.target().capability != (9, 0)
    ):
        return None
    k, v = pages.arrays["k"], pages.arrays["v"]
    if is_empty:
        # Where tokens that see each other only find keys in pages as fast as side by side.
        q_BTNH = heads_BTNH[:, :, : heads_BTNH.shape[2] - 2 * k.shape[2]]
        is_plain = pages.format is CacheFormat.PLAIN
        if not is_plain or not attends_chunk(q_BTNH, k, v, pages.tables_BM):
            return None
    append = functools.partial(
        pallas_kernels.append_heads,
        heads_BTNH,
        k,
        v,
        pages.tables_BM,
        positions_BT,
        rope,
        k_scale=pages.arrays.get("k" + SCALE),
        v_scale=pages.arrays.get("v" + SCALE),
    )
    if is_ordered:
        try:
            q_BTNH, *pools = append(implementation="hopper", is_ordered=True)
        except pallas_kernels.UnsupportedError:
            return None
    else:
        q_BTNH, *pools = append()
    names = [name for name in ("k", "v", "k" + SCALE, "v" + SCALE) if name in pages.arrays]
    return q_BTNH, dict(zip(names, pools, strict=True))
