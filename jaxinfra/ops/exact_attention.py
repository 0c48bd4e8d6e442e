"""Attention whose results depend on a query's own keys alone, in plain JAX.

A query attends to blocks of keys, counted from the first token of its own sequence. So the order of
its sums is the same in a packed training row, in a chunk of a prompt and in a decode step over
pages. All blocks have one shape, and a loop computes one at a time.

Dims: B batch, T query position, S key position, Q query of a block, C key of a block, N query
heads, K key/value heads, H head width, I block of a row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxinfra.config.model import GroupedAttentionConfig, LatentAttentionConfig, MixerConfig
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.exact import pinned, rounded
from jaxinfra.ops.attention import attention
from jaxinfra.ops.cached_attention import Pages, paged_attention
from pallas_kernels.common import device
from pallas_kernels.common.dot import ACCUMULATOR, pinned_einsum
from pallas_kernels.flash_attention import LSE_NAME, OUT_NAME

QUERIES, KEYS = 16, 32  # of a block
_NOTHING = -1e30  # largest score of a query that has seen no key; finite: no NaN comes of it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """The settings of a layer's scores; static."""

    scale: float
    window: int | None
    soft_cap: float | None


type _KeysAt = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""First key of a block, counted from the sequence's first -> keys and values [C, K, H]."""


def exact_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K Hv"],
    *,
    config: MixerConfig,
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Computes self-attention within documents, as ``ops.attention.attention`` does.

    The gradient is that of ``flash_attention_gradient``; only the result has a fixed order.
    """
    if isinstance(config, LatentAttentionConfig):
        config = rebuilt_heads(config)
    assert isinstance(config, GroupedAttentionConfig), "check_exact"
    if device.target().is_gpu:
        _check_on_gpu(config)
        if segment_ids_BT is not None:
            raise UnsupportedError(
                "numerics=exact with packed documents on a GPU: its kernel counts blocks of keys "
                "from a row's first token; give each document a row of its own"
            )
        return attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            config=config,
            segment_ids_BT=None,
            sinks_N=sinks_N,
            implementation=AttentionImplementation.HOPPER,
        )
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32)
    if sinks_N is None:
        sinks_N = jnp.full(q_BTNH.shape[2], -jnp.inf, ACCUMULATOR)
    return _attend(_scores(config), q_BTNH, k_BTKH, v_BTKH, sinks_N, segment_ids_BT)


def exact_cached_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    *,
    config: GroupedAttentionConfig,
    positions_BT: jax.Array,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes attention of new queries to all cached keys, as ``cached_attention`` does."""
    if device.target().is_gpu:
        _check_on_gpu(config)
        return paged_attention(
            q_BTNH,
            pages,
            config=config,
            positions_BT=positions_BT,
            sinks_N=sinks_N,
            is_ordered=True,
        )
    rows = pages.tokens(q_BTNH.dtype)
    batch, length, num_heads, _ = q_BTNH.shape
    k_BSKH, v_BSKH = (_padded(rows[name], KEYS) for name in ("k", "v"))
    num_blocks = -(-length // QUERIES)
    q_BTNH = _padded(q_BTNH, num_blocks * QUERIES - length)
    ends_B = jnp.max(positions_BT, axis=1) + 1
    scores = _scores(config)

    def block(i: jax.Array) -> jax.Array:
        b, place = i // num_blocks, i % num_blocks * QUERIES
        first = positions_BT[b, 0] + place

        def keys_at(s: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _rows(k_BSKH, b, s, KEYS), _rows(v_BSKH, b, s, KEYS)

        q_QNH = _rows(q_BTNH, b, place, QUERIES)
        return _block(scores, q_QNH, keys_at, first, ends_B[b], sinks_N)[0]

    out_IQNH = jax.lax.map(block, jnp.arange(batch * num_blocks))
    out_BTNH = out_IQNH.reshape(batch, num_blocks * QUERIES, num_heads, -1)[:, :length]
    return jnp.where(positions_BT[:, :, None, None] >= 0, out_BTNH, jnp.zeros((), out_BTNH.dtype))


def rebuilt_heads(config: LatentAttentionConfig) -> GroupedAttentionConfig:
    """Returns the attention of heads whose keys and values are rebuilt from latents.

    Exact numerics have no other form of latent attention: sums over latents would be others than
    those over the keys that a training pass rebuilds.
    """
    return GroupedAttentionConfig(
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_q_heads,
        head_dim=config.head_dim,
        rope=None,
        window=config.window,
        logit_soft_cap=config.logit_soft_cap,
        scale=config.scale,
    )


PROVEN_WIDTHS = (64, 128)
"""Widths of heads whose bits were compared on an H200."""


def _check_on_gpu(config: GroupedAttentionConfig) -> None:
    """Raises UnsupportedError for attention whose bits were not compared on a GPU."""
    unproven = [
        f"{name}={value}"
        for name, value in (
            ("sinks", config.sinks or None),
            ("head_dim", None if config.head_dim in PROVEN_WIDTHS else config.head_dim),
        )
        if value is not None
    ]
    if unproven:
        raise UnsupportedError(
            f"numerics=exact with {', '.join(unproven)} on a GPU: its kernels are proven for heads "
            f"of {' or '.join(map(str, PROVEN_WIDTHS))} without sinks; set numerics=fast"
        )


def _scores(config: GroupedAttentionConfig) -> _Scores:
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    return _Scores(scale=scale, window=config.window, soft_cap=config.logit_soft_cap)


def _padded(x: jax.Array, tokens: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, tokens), (0, 0), (0, 0)))


def _rows(x: jax.Array, b: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """``count`` tokens of row b, [count, heads, H]."""
    zero = jnp.zeros((), first.dtype)
    start = (b.astype(first.dtype), first, zero, zero)
    return jax.lax.dynamic_slice(x, start, (1, count, *x.shape[2:]))[0]


def _block(
    scores: _Scores,
    q_QNH: jax.Array,
    keys_at: _KeysAt,
    first: jax.Array,
    end: jax.Array,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns a block's results [Q, N, H] in q's dtype, and its logsumexp, fp32 [Q, N].

    Heads are computed one by one, so that their bits do not depend on how many a device has.

    Args:
        first: position of the first query in its sequence; the others follow.
        end: number of the sequence's keys.
        sinks_N: logits without values; -inf or None for none.
    """
    num_heads = q_QNH.shape[1]
    k_CKH, v_CKH = jax.eval_shape(keys_at, jax.ShapeDtypeStruct((), jnp.int32))
    group = num_heads // k_CKH.shape[1]
    positions_Q = first + jnp.arange(QUERIES, dtype=jnp.int32)
    begin = jnp.int32(0)
    if scores.window is not None:
        begin = jnp.maximum(first - scores.window + 1, 0) // KEYS
    last = -(-jnp.minimum(first + QUERIES, end) // KEYS)

    def head(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_QH = jax.lax.optimization_barrier(q_QNH[:, n])
        largest_Q1 = jnp.full((QUERIES, 1), _NOTHING, ACCUMULATOR)
        start = (
            largest_Q1,
            jnp.zeros_like(largest_Q1),
            jnp.zeros((QUERIES, v_CKH.shape[2]), ACCUMULATOR),
        )

        def step(j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slots_C = j * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
            k_CH, v_CH = (x[:, n // group] for x in keys_at(j * KEYS))
            return _with_keys(scores, sums, q_QH, k_CH, v_CH, positions_Q, slots_C, end)

        sums = jax.lax.fori_loop(begin, last, step, start)
        sink = None if sinks_N is None else sinks_N[n].astype(ACCUMULATOR)
        return jax.lax.optimization_barrier(_finished(sums, sink, q_QH.dtype))

    out_NQH, lse_NQ = jax.lax.map(head, jnp.arange(num_heads, dtype=jnp.int32))
    return jnp.moveaxis(out_NQH, 0, 1), lse_NQ.T


def _with_keys(
    scores: _Scores,
    sums: tuple[jax.Array, ...],
    q_QH: jax.Array,
    k_CH: jax.Array,
    v_CH: jax.Array,
    positions_Q: jax.Array,
    slots_C: jax.Array,
    end: jax.Array,
) -> tuple[jax.Array, ...]:
    """Adds a block of keys to a head's largest score, sum of weights and sum of values."""
    largest_Q1, total_Q1, out_QH = sums
    is_there_C = slots_C < end
    v_CH = jnp.where(is_there_C[:, None], v_CH, jnp.zeros((), v_CH.dtype))
    age_QC = positions_Q[:, None] - slots_C[None]
    sees_QC = (age_QC >= 0) & is_there_C[None]
    if scores.window is not None:
        sees_QC &= age_QC < scores.window
    s_QC = pinned_einsum("QH,CH->QC", q_QH, k_CH, result=ACCUMULATOR)
    s_QC = pinned(s_QC * scores.scale)
    if scores.soft_cap is not None:
        s_QC = pinned(scores.soft_cap * jnp.tanh(s_QC / scores.soft_cap))
    s_QC = jnp.where(sees_QC, s_QC, -jnp.inf)
    new_Q1 = jnp.maximum(largest_Q1, jnp.max(s_QC, axis=-1, keepdims=True))
    decay_Q1 = jnp.exp(largest_Q1 - new_Q1)
    weights_QC = jnp.exp(s_QC - new_Q1)
    values_QH = pinned_einsum(
        "QC,CH->QH", rounded(weights_QC, v_CH.dtype), v_CH, result=ACCUMULATOR
    )
    total_Q1 = pinned(decay_Q1 * total_Q1) + jnp.sum(weights_QC, axis=-1, keepdims=True)
    return new_Q1, total_Q1, pinned(decay_Q1 * out_QH) + values_QH


def _finished(
    sums: tuple[jax.Array, ...], sink: jax.Array | None, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Divides a head's sums by the softmax's, the share of its sink included."""
    largest_Q1, total_Q1, out_QH = sums
    if sink is not None:
        new_Q1 = jnp.maximum(largest_Q1, sink)
        decay_Q1 = jnp.exp(largest_Q1 - new_Q1)
        total_Q1 = pinned(decay_Q1 * total_Q1) + jnp.exp(sink - new_Q1)
        largest_Q1, out_QH = new_Q1, decay_Q1 * out_QH
    is_empty_Q1 = total_Q1 == 0.0
    out_QH = out_QH / jnp.where(is_empty_Q1, 1.0, total_Q1)
    lse_Q1 = jnp.where(is_empty_Q1, -jnp.inf, largest_Q1 + jnp.log(total_Q1))
    return rounded(out_QH, dtype), lse_Q1[:, 0]


def _packed(
    scores: _Scores,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    sinks_N: jax.Array,
    segment_ids_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results and the logsumexp of packed rows; 0 and -inf for padding.

    Blocks of queries begin at a document's first token and every 16 tokens behind it.
    """
    batch, length = segment_ids_BT.shape
    q_BTNH, k_BTKH, v_BTKH = (
        _padded(x, more) for x, more in ((q_BTNH, QUERIES), (k_BTKH, KEYS), (v_BTKH, KEYS))
    )
    index_T = jnp.arange(length, dtype=jnp.int32)

    def row(b: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def block(carry: Any) -> Any:
            t, begin, end, results = carry
            is_new, segment = t == end, segment_ids_BT[b, t]
            begin = jnp.where(is_new, t, begin)
            is_beyond_T = (segment_ids_BT[b] != segment) & (index_T > t)
            next_end = jnp.where(jnp.any(is_beyond_T), jnp.argmax(is_beyond_T), length)
            end = jnp.where(is_new, next_end.astype(jnp.int32), end)

            def keys_at(s: jax.Array) -> tuple[jax.Array, jax.Array]:
                return _rows(k_BTKH, b, begin + s, KEYS), _rows(v_BTKH, b, begin + s, KEYS)

            num_keys = jnp.where(segment < 0, 0, end - begin)  # none for padding
            q_QNH = _rows(q_BTNH, b, t, QUERIES)
            found = _block(scores, q_QNH, keys_at, t - begin, num_keys, sinks_N)
            written = jax.tree.map(functools.partial(put, t, end), results, found)
            return jnp.minimum(t + QUERIES, end), begin, end, written

        def put(t: jax.Array, end: jax.Array, stored: jax.Array, new: jax.Array) -> jax.Array:
            is_own_Q = t + jnp.arange(QUERIES, dtype=jnp.int32) < end
            start = (b, t, *(jnp.int32(0),) * (stored.ndim - 2))
            old = jax.lax.dynamic_slice(stored, start, (1, *new.shape))[0]
            kept = jnp.where(jnp.expand_dims(is_own_Q, range(1, new.ndim)), new, old)
            return jax.lax.dynamic_update_slice(stored, kept[None], start)

        zero = jnp.int32(0)
        start = zero, zero, zero, results
        return jax.lax.while_loop(lambda carry: carry[0] < length, block, start)[3]

    shape = q_BTNH.shape[:3]
    out_BTNH = jnp.zeros((*shape, v_BTKH.shape[3]), q_BTNH.dtype)
    start = out_BTNH, jnp.full(shape, -jnp.inf, ACCUMULATOR)
    out_BTNH, lse_BTN = jax.lax.fori_loop(0, batch, row, start)
    return out_BTNH[:, :length], lse_BTN[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scores, q_BTNH, k_BTKH, v_BTKH, sinks_N, segment_ids_BT):
    return _packed(scores, q_BTNH, k_BTKH, v_BTKH, sinks_N, segment_ids_BT)[0]


def _attend_forward(scores, q_BTNH, k_BTKH, v_BTKH, sinks_N, segment_ids_BT):
    operands = q_BTNH, k_BTKH, v_BTKH, sinks_N, segment_ids_BT
    out_BTNH, lse_BTN = _packed(scores, *operands)
    out_BTNH, lse_BTN = checkpoint_name(out_BTNH, OUT_NAME), checkpoint_name(lse_BTN, LSE_NAME)
    return out_BTNH, (*operands, out_BTNH, lse_BTN)


def _attend_backward(scores, residuals, d_BTNH):
    q_BTNH, k_BTKH, v_BTKH, sinks_N, segment_ids_BT, out_BTNH, lse_BTN = residuals
    gradients = pallas_kernels.flash_attention_gradient(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        out_BTNH,
        lse_BTN,
        d_BTNH,
        scale=scores.scale,
        is_causal=True,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        q_segment_ids=segment_ids_BT,
        kv_segment_ids=segment_ids_BT,
        logit_soft_cap=scores.soft_cap,
    )
    wide = (x.astype(ACCUMULATOR) for x in (out_BTNH, d_BTNH))
    dots_BTN = jnp.sum(functools.reduce(jnp.multiply, wide), axis=-1)
    shares_BTN = jnp.where(jnp.isfinite(lse_BTN), jnp.exp(sinks_N[None, None] - lse_BTN), 0.0)
    d_sinks_N = -jnp.sum(shares_BTN * dots_BTN, axis=(0, 1))
    return (*gradients, d_sinks_N.astype(sinks_N.dtype), None)


_attend.defvjp(_attend_forward, _attend_backward)
