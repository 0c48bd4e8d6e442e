"""Caches keep what is appended where it belongs, and attention reads it in any order of pages.

Dims: B batch, T query, S key, N query heads, K kv heads, H head width, P page, M page of a row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.cache import CachedArray, CacheFormat, CacheSpec
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.model.cache import ContiguousCache, PagedCache, after_pass, in_layer
from jaxinfra.ops.cached_attention import cached_attention, paged_attention
from jaxinfra.ops.quantized import H200, compiling_for
from tests.tolerance import assert_no_worse

BATCH, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 8
LAYERS, LAYER = 3, 1
PAGE, PAGES_OF_A_ROW, POOL = 16, 12, 64
SLOTS = PAGE * PAGES_OF_A_ROW
JUNK = 1e4  # what nobody may see


def attention(**options) -> GroupedAttentionConfig:
    return GroupedAttentionConfig(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, rope=None, **options
    )


CONFIGS = {
    "plain": attention(),
    "window": attention(window=5),
    "gemma": attention(window=40, logit_soft_cap=2.0, scale=0.3),
}


def caches(spec: CacheSpec, tables_BM: np.ndarray, *, dtype=jnp.float32):
    """A contiguous and a paged cache full of junk, as one layer sees them."""
    sizes = {"num_layers": LAYERS, "dtype": dtype}
    contiguous = ContiguousCache.zeros(spec, batch=BATCH, num_slots=SLOTS, **sizes)
    paged = PagedCache.zeros(
        spec, num_pages=POOL, page_size=PAGE, tables_BM=jnp.asarray(tables_BM, jnp.int32), **sizes
    )
    assert contiguous.is_empty
    assert paged.is_empty
    assert contiguous.num_slots == SLOTS
    for cache in (contiguous, paged):
        junk = {
            name: jnp.asarray(np.full(stored.shape, JUNK, stored.dtype))
            for name, stored in cache.arrays.items()
        }
        yield in_layer(cache, junk, jnp.int32(LAYER))


def random_tables(rng) -> np.ndarray:
    return rng.permutation(POOL)[: BATCH * PAGES_OF_A_ROW].reshape(BATCH, PAGES_OF_A_ROW)


def oracle(q, k, v, positions_BT, config, dtype=np.float64) -> np.ndarray:
    """Attention to the keys at 0..position of each query, in NumPy."""
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scale = dtype(WIDTH**-0.5 if config.scale is None else config.scale)
    scores = scale * np.einsum("BTNH,BSNH->BNTS", q, k)
    if config.logit_soft_cap is not None:
        scores = dtype(config.logit_soft_cap) * np.tanh(scores / dtype(config.logit_soft_cap))
    age = positions_BT[:, :, None] - np.arange(k.shape[1])
    visible = ((age >= 0) & (age < (config.window or SLOTS)))[:, None]
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(dtype).tiny)
    return np.einsum("BNTS,BSNH->BTNH", weights, v).astype(dtype)


@functools.partial(jax.jit, static_argnames=("config",))
def attend_pages(q, cache, positions, *, config):
    pages = cache.view()
    return paged_attention(q, pages, config=config, positions_BT=positions, implementation="xla")


@functools.partial(jax.jit, static_argnames=("config",))
def attend(q, cache, positions, *, config):
    return cached_attention(q, cache.view(), config=config, positions_BT=positions)


append = jax.jit(lambda cache, new, positions: cache.append(new, positions))
latents = jax.jit(lambda cache: cache.view().rows()["latent"])


def filled_rows(rng, num_queries: int):
    """q, keys and values of all slots, the positions that rows fill and those of their queries."""
    lengths = rng.integers(num_queries, SLOTS, BATCH)
    k, v = (rng.normal(size=(BATCH, SLOTS, KV_HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    q = rng.normal(size=(BATCH, num_queries, HEADS, WIDTH)).astype(np.float32)
    filled = np.where(np.arange(SLOTS) < lengths[:, None], np.arange(SLOTS), -1).astype(np.int32)
    positions = (lengths[:, None] - num_queries + np.arange(num_queries)).astype(np.int32)
    return q, k, v, filled, positions


@pytest.mark.parametrize("num_queries", [1, 3, 130])
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_over_both_caches_is_that_over_the_keys(name, num_queries):
    config = CONFIGS[name]
    rng = np.random.default_rng(num_queries)
    q, k, v, filled, positions = filled_rows(rng, num_queries)
    positions[0, 1:] = -1  # padding
    padding = positions < 0
    results = []
    for cache in caches(config.cache, random_tables(rng)):
        cache = append(cache, {"k": k, "v": v}, filled)
        results.append(np.asarray(attend(q, cache, positions, config=config)))
        assert not results[-1][padding].any()
    # The same sums over the same keys, wherever they lie.
    np.testing.assert_array_equal(*results)
    plain = oracle(q, k, v, positions, config, np.float32)[~padding]
    true = oracle(q, k, v, positions, config)[~padding]
    for result in results:
        assert_no_worse(result[~padding], plain=plain, oracle=true)


@pytest.mark.parametrize(("name", "num_queries"), [("plain", 1), ("gemma", 3)])
def test_pages_are_read_where_they_lie(name, num_queries):
    config = CONFIGS[name]
    rng = np.random.default_rng(num_queries)
    q, k, v, filled, positions = filled_rows(rng, num_queries)
    positions[0, num_queries // 2 + 1 :] = -1  # padding
    positions[1] = -1  # a row that sits out
    padding = positions < 0
    plain = oracle(q, k, v, positions, config, np.float32)[~padding]
    true = oracle(q, k, v, positions, config)[~padding]
    for cache in caches(config.cache, random_tables(rng)):
        cache = append(cache, {"k": k, "v": v}, filled)
        result = np.asarray(attend_pages(q, cache, positions, config=config))
        assert not result[padding].any()
        assert_no_worse(result[~padding], plain=plain, oracle=true)


@pytest.mark.slow_cases("bfloat16-plain-False-2", "bfloat16-fp8-True-8", "bfloat16-plain-True-2")
@pytest.mark.parametrize(
    ("dtype", "form", "paged", "heads"),
    [
        (jnp.bfloat16, CacheFormat.PLAIN, True, 2),
        (jnp.bfloat16, CacheFormat.PLAIN, False, 2),
        (jnp.float32, CacheFormat.PLAIN, True, 2),
        (jnp.bfloat16, CacheFormat.FP8, True, 8),
        (jnp.bfloat16, CacheFormat.FP8, True, 2),
    ],
)
def test_on_hopper_the_kernels_read_the_cache(dtype, form, paged, heads):
    config = GroupedAttentionConfig(num_q_heads=8, num_kv_heads=heads, head_dim=64, rope=None)
    page = PAGE if form is CacheFormat.PLAIN else 64
    shape = jax.ShapeDtypeStruct
    sizes = {"num_layers": 2, "dtype": dtype, "form": form}

    def empty():
        if not paged:
            return ContiguousCache.zeros(config.cache, batch=3, num_slots=32, **sizes)
        tables = jnp.zeros((3, 2), jnp.int32)
        return PagedCache.zeros(
            config.cache, num_pages=8, page_size=page, tables_BM=tables, **sizes
        )

    def step(q, cache, positions):
        cache = in_layer(cache, cache.arrays, jnp.int32(1))
        return cached_attention(q, cache.view(), config=config, positions_BT=positions)

    arguments = shape((3, 1, 8, 64), dtype), jax.eval_shape(empty), shape((3, 1), jnp.int32)
    with compiling_for(H200):
        text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == (dtype == jnp.bfloat16)


def test_the_tolerance_notices_a_key_too_many():
    config = attention(window=41)
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(BATCH, SLOTS, KV_HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    q = rng.normal(size=(BATCH, 1, HEADS, WIDTH)).astype(np.float32)
    positions = np.full((BATCH, 1), SLOTS - 1)
    true = oracle(q, k, v, positions, attention(window=40))
    plain = oracle(q, k, v, positions, attention(window=40), np.float32)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse(oracle(q, k, v, positions, config, np.float32), plain=plain, oracle=true)


LATENT = CacheSpec(arrays=(CachedArray(name="latent", shape=(5,), dims=(None,)),))


def test_appending_touches_nothing_else():
    rng = np.random.default_rng(2)
    tables = random_tables(rng)
    tables[1, 1:] = -1  # row 1 has one page yet
    new = rng.normal(size=(BATCH, 4, 5)).astype(np.float32)
    # Over the edge of a page; beyond what a row has; padding, and beyond the end.
    positions = np.array([[14, 15, 16, 17], [14, 15, 16, 17], [-1, 3, -1, SLOTS]], np.int32)
    there = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]], bool)
    contiguous, paged = (append(c, {"latent": new}, positions) for c in caches(LATENT, tables))

    expected = np.full((LAYERS, POOL, PAGE, 5), JUNK, np.float32)
    for row, t in np.argwhere(there):
        page, slot = divmod(positions[row, t], PAGE)
        expected[LAYER, tables[row, page], slot] = new[row, t]
    np.testing.assert_array_equal(paged.arrays["latent"], expected)

    there[1] = True  # a contiguous row has all its slots from the beginning
    expected = np.full((LAYERS, BATCH, SLOTS, 5), JUNK, np.float32)
    for row, t in np.argwhere(there):
        expected[LAYER, row, positions[row, t]] = new[row, t]
    np.testing.assert_array_equal(contiguous.arrays["latent"], expected)
    rows = np.asarray(latents(contiguous))
    np.testing.assert_array_equal(rows, expected[LAYER])
    np.testing.assert_array_equal(np.asarray(latents(paged))[0], rows[0])


def test_rows_read_a_shared_page():
    rng = np.random.default_rng(3)
    tables = random_tables(rng)
    tables[1:, 0] = tables[0, 0]
    new = rng.normal(size=(BATCH, PAGE, 5)).astype(np.float32)
    _, paged = caches(LATENT, tables)
    positions = np.tile(np.arange(PAGE, dtype=np.int32), (BATCH, 1))
    positions[1:] = -1  # only the first row writes the prefix
    rows = np.asarray(latents(append(paged, {"latent": new}, positions)))
    for row in range(BATCH):
        np.testing.assert_array_equal(rows[row, :PAGE], new[0])


def test_a_cache_is_empty_until_a_pass_is_over():
    cache = ContiguousCache.zeros(LATENT, num_layers=2, batch=1, num_slots=4, dtype=jnp.bfloat16)
    inside = in_layer(cache, cache.arrays, jnp.int32(0))
    assert inside.append({"latent": jnp.ones((1, 2, 5))}, jnp.arange(2)[None]).is_empty
    after = after_pass(cache, cache.arrays)
    assert not after.is_empty
    assert after.layer is None
    assert after.arrays["latent"].dtype == jnp.bfloat16
