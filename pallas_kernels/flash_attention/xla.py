"""Portable attention in plain XLA: chunked online softmax, with memory linear in sequence length.

The score matrix is cut into tiles of a query chunk by a key chunk. One loop visits the tiles that
the positional masks leave visible, from a list made at trace time. A hidden tile costs nothing, and
the compiler knows the trip count. Forward keeps a running (maximum, sum, accumulator) per row
(Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1); backward recomputes each tile from
logsumexp (Dao 2023, algorithm 2) and sums dq, dk, dv in float32.

Dims: B batch, T query, S key, N query heads, K kv heads, G query heads per kv head, H query and key
width, V value width; I query chunk, J key chunk; t and s are positions within a chunk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import device
from pallas_kernels.common.dot import einsum_f32

from .reference import grouped_bias
from .spec import (
    AttentionGradients,
    AttentionMasks,
    AttentionSpec,
    BackwardOperands,
    visible_BTS,
    visible_tiles,
)

# Scores of one tile over all batch rows and heads, in elements. On a CPU a tile that stays in
# cache won by up to 4 times over one chunk (2 cores, lengths 256 to 4096); on a GPU a tile must be
# large enough to fill it, and is bounded by the memory it takes (256 MiB in float32).
_TILE_SCORES = {"cpu": 2**18, "gpu": 2**26}
_SHORTEST_CHUNK = {"cpu": 64, "gpu": 128}
MAX_CHUNK = 1024


def longest_chunk(rows: int) -> int:
    """Returns the most positions per chunk, where a tile has ``rows`` = batch times query heads."""
    platform = "gpu" if device.target().is_gpu else "cpu"
    fitting = 2 ** int(math.log2(max(1.0, math.sqrt(_TILE_SCORES[platform] / rows))))
    return min(max(fitting, _SHORTEST_CHUNK[platform]), MAX_CHUNK)


def chunk_length(length: int, longest: int) -> int:
    """Returns the positions per chunk: at most ``longest``, split evenly to keep padding small."""
    count = max(1, -(-length // longest))
    even = -(-length // count)
    return max(1, even if count == 1 else -(-even // 8) * 8)


def _split(x: jax.Array, *, dim: int, chunk: int, fill: float = 0) -> jax.Array:
    """Cuts a dim in chunks, padding the last with ``fill``; the chunk index becomes dim 0."""
    count = max(1, -(-x.shape[dim] // chunk))
    padding = count * chunk - x.shape[dim]
    if padding:
        widths = [(0, padding if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(*x.shape[:dim], count, chunk, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def _join(x: jax.Array, *, dim: int, length: int) -> jax.Array:
    """Undoes ``_split``: the first dim returns in front of ``dim - 1``, padding is cut off."""
    x = jnp.moveaxis(x, 0, dim)
    x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=dim)


def _at(x: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns chunk ``index`` of a split array, by a static slice where there is only one chunk."""
    if x.shape[0] == 1:
        return x[0]
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _add_at(x: jax.Array, index: jax.Array | int, update: jax.Array) -> jax.Array:
    """Adds ``update`` to chunk ``index`` of x and returns the result."""
    if x.shape[0] == 1:
        return x + update[None]
    return lax.dynamic_update_index_in_dim(x, _at(x, index) + update, index, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Tiles:
    """One attention call cut in tiles, as both the forward and the backward pass use it."""

    spec: AttentionSpec
    masks: AttentionMasks
    num_kv_heads: int
    q_length: int
    kv_length: int
    q_chunk: int
    kv_chunk: int
    q_ids_IBt: jax.Array | None
    kv_ids_JBs: jax.Array | None
    bias_BKGTS: jax.Array | None  # padded to whole chunks in the dims it does not broadcast

    def visible(self, i: jax.Array | int, j: jax.Array | int) -> jax.Array | None:
        """Returns which entries of tile (i, j) are visible, bool [B or 1, t, s]; None if all."""
        q_positions = i * self.q_chunk + jnp.arange(self.q_chunk)
        kv_positions = j * self.kv_chunk + jnp.arange(self.kv_chunk)
        masks = dataclasses.replace(
            self.masks,
            q_segment_ids=None if self.q_ids_IBt is None else _at(self.q_ids_IBt, i),
            kv_segment_ids=None if self.kv_ids_JBs is None else _at(self.kv_ids_JBs, j),
        )
        result = visible_BTS(
            self.spec,
            masks,
            diagonal=self.kv_length - self.q_length,
            q_positions_T=q_positions,
            kv_positions_S=kv_positions,
        )
        # Padding of the last chunk: padded keys would join the softmax, padded queries would meet
        # a logsumexp that is not theirs in the backward pass.
        for length, chunk, inside in (
            (self.q_length, self.q_chunk, q_positions[None, :, None] < self.q_length),
            (self.kv_length, self.kv_chunk, kv_positions[None, None, :] < self.kv_length),
        ):
            if length % chunk:
                result = inside if result is None else result & inside
        return result

    def bias_slice(
        self, i: jax.Array | int, j: jax.Array | int
    ) -> tuple[tuple[jax.Array | int, ...], tuple[int, ...]]:
        """Returns the start and shape of tile (i, j) of the bias in ``bias_BKGTS``."""
        assert self.bias_BKGTS is not None
        *outer, t, s = self.bias_BKGTS.shape
        start = (0, 0, 0, i * self.q_chunk if t > 1 else 0, j * self.kv_chunk if s > 1 else 0)
        return start, (*outer, min(t, self.q_chunk), min(s, self.kv_chunk))

    def scores(
        self,
        q_BKGtH: jax.Array,
        k_BKsH: jax.Array,
        i: jax.Array | int,
        j: jax.Array | int,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes tile (i, j)'s masked float32 scores, and the soft cap's derivative if any."""
        s_BKGts = einsum_f32("BKGtH,BKsH->BKGts", q_BKGtH, k_BKsH) * self.spec.scale
        slope_BKGts = None
        if self.spec.logit_soft_cap is not None:
            tanh_BKGts = jnp.tanh(s_BKGts / self.spec.logit_soft_cap)
            s_BKGts = self.spec.logit_soft_cap * tanh_BKGts
            slope_BKGts = 1.0 - tanh_BKGts * tanh_BKGts
        if self.bias_BKGTS is not None:
            bias = lax.dynamic_slice(self.bias_BKGTS, *self.bias_slice(i, j))
            s_BKGts += jnp.broadcast_to(bias, s_BKGts.shape)
        visible = self.visible(i, j)
        if visible is not None:
            s_BKGts = jnp.where(visible[:, None, None], s_BKGts, -jnp.inf)
        return s_BKGts, slope_BKGts


def _cut(
    q_BTNH: jax.Array, k_BSKH: jax.Array, masks: AttentionMasks, spec: AttentionSpec
) -> _Tiles:
    B, T, N, _ = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    longest = longest_chunk(B * N)
    q_chunk, kv_chunk = chunk_length(T, longest), chunk_length(S, longest)
    bias = None
    if masks.bias is not None:
        bias = grouped_bias(masks.bias, K)
        ends = zip(bias.shape[3:], (q_chunk, kv_chunk), strict=True)
        padding = [(0, -size % chunk if size > 1 else 0) for size, chunk in ends]
        bias = jnp.pad(bias, [(0, 0)] * 3 + padding)
    ids_q, ids_kv = masks.q_segment_ids, masks.kv_segment_ids
    return _Tiles(
        spec=spec,
        masks=masks,
        num_kv_heads=K,
        q_length=T,
        kv_length=S,
        q_chunk=q_chunk,
        kv_chunk=kv_chunk,
        q_ids_IBt=None if ids_q is None else _split(ids_q, dim=1, chunk=q_chunk, fill=-1),
        kv_ids_JBs=None if ids_kv is None else _split(ids_kv, dim=1, chunk=kv_chunk, fill=-1),
        bias_BKGTS=bias,
    )


def _split_q(x_BTNH: jax.Array, tiles: _Tiles) -> jax.Array:
    B, T, N, H = x_BTNH.shape
    K = tiles.num_kv_heads
    x_IBtKGH = _split(x_BTNH.reshape(B, T, K, N // K, H), dim=1, chunk=tiles.q_chunk)
    return jnp.moveaxis(x_IBtKGH, 2, 4)  # [I, B, K, G, t, H]


def _split_kv(x_BSKH: jax.Array, tiles: _Tiles) -> jax.Array:
    return jnp.moveaxis(_split(x_BSKH, dim=1, chunk=tiles.kv_chunk), 2, 3)  # [J, B, K, s, H]


def _join_q(x_IBKGtH: jax.Array, tiles: _Tiles) -> jax.Array:
    x_BTKGH = _join(jnp.moveaxis(x_IBKGtH, 4, 2), dim=1, length=tiles.q_length)
    B, T, K, G, H = x_BTKGH.shape
    return x_BTKGH.reshape(B, T, K * G, H)


def _join_kv(x_JBKsH: jax.Array, tiles: _Tiles) -> jax.Array:
    return _join(jnp.moveaxis(x_JBKsH, 3, 2), dim=1, length=tiles.kv_length)


def _loop[C](body: Callable[[C, tuple], C], carry: C, tiles: _Tiles) -> C:
    """Runs ``body`` over the visible tiles: without a loop where there is but one."""
    positions = visible_tiles(
        tiles.spec,
        q_length=tiles.q_length,
        kv_length=tiles.kv_length,
        q_tile=tiles.q_chunk,
        kv_tile=tiles.kv_chunk,
    )
    if len(positions) == 1:
        i, j = positions[0]
        return body(carry, (int(i), int(j)))
    pairs = (jnp.asarray(positions[:, 0]), jnp.asarray(positions[:, 1]))
    return lax.scan(lambda c, pair: (body(c, pair), None), carry, pairs)[0]


def _finite(x: jax.Array) -> jax.Array:
    """Replaces -inf by 0, so that subtracting it from -inf gives -inf and not NaN."""
    return jnp.where(jnp.isneginf(x), 0.0, x)


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention a tile at a time, in O(T + S) memory unless a bias is given.

    Returns:
        out [B, T, N, V] in q's dtype, logsumexp float32 [B, T, N].
    """
    tiles = _cut(q_BTNH, k_BSKH, masks, spec)
    q_IBKGtH = _split_q(q_BTNH, tiles)
    k_JBKsH, v_JBKsV = _split_kv(k_BSKH, tiles), _split_kv(v_BSKV, tiles)
    K, G = q_IBKGtH.shape[2:4]

    def merge(carry, pair):
        i, j = pair
        m_IBKGt, l_IBKGt, acc_IBKGtV = carry
        s_BKGts, _ = tiles.scores(_at(q_IBKGtH, i), _at(k_JBKsH, j), i, j)
        m_old = _at(m_IBKGt, i)
        m_new = jnp.maximum(m_old, jnp.max(s_BKGts, axis=-1))
        p_BKGts = jnp.exp(s_BKGts - _finite(m_new)[..., None])
        keep = jnp.exp(m_old - _finite(m_new))
        l_new = _at(l_IBKGt, i) * keep + jnp.sum(p_BKGts, axis=-1)
        pv_BKGtV = einsum_f32("BKGts,BKsV->BKGtV", p_BKGts.astype(v_BSKV.dtype), _at(v_JBKsV, j))
        acc_new = _at(acc_IBKGtV, i) * keep[..., None] + pv_BKGtV
        put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return put(m_IBKGt, m_new), put(l_IBKGt, l_new), put(acc_IBKGtV, acc_new)

    # Derived from q so that the carry starts with q's sharding and varying mesh axes. A sink is a
    # key of value 0 that every row has seen before the first tile.
    zero_IBKGt = jnp.zeros_like(q_IBKGtH[..., 0], dtype=jnp.float32)
    if masks.sinks is None:
        m_IBKGt, l_IBKGt = zero_IBKGt - jnp.inf, zero_IBKGt
    else:
        m_IBKGt = zero_IBKGt + jnp.broadcast_to(
            masks.sinks.reshape(1, 1, K, G, 1), zero_IBKGt.shape
        )
        l_IBKGt = zero_IBKGt + 1.0
    acc_IBKGtV = jnp.broadcast_to(zero_IBKGt[..., None], (*zero_IBKGt.shape, v_BSKV.shape[-1]))
    m_IBKGt, l_IBKGt, acc_IBKGtV = _loop(merge, (m_IBKGt, l_IBKGt, acc_IBKGtV), tiles)

    empty = (l_IBKGt == 0.0) | jnp.isneginf(m_IBKGt)
    l_IBKGt = jnp.where(empty, 1.0, l_IBKGt)
    out_BTNV = _join_q((acc_IBKGtV / l_IBKGt[..., None]).astype(q_BTNH.dtype), tiles)
    lse_IBKGt = jnp.where(empty, -jnp.inf, m_IBKGt + jnp.log(l_IBKGt))
    return out_BTNV, _join_q(lse_IBKGt[..., None], tiles)[..., 0]


def backward(operands: BackwardOperands, *, spec: AttentionSpec) -> AttentionGradients:
    """Computes attention's gradients from (out, logsumexp): dS = P (dP - rowsum(dO O) + dlse).

    The gradients repeat bit for bit, as tiles are always summed in one order.
    """
    q_BTNH, k_BSKH, v_BSKV, masks = operands.q, operands.k, operands.v, operands.masks
    out_BTNV, lse_BTN = operands.out, operands.lse
    d_out_BTNV, d_lse_BTN = operands.d_out, operands.d_lse
    assert d_lse_BTN is not None
    tiles = _cut(q_BTNH, k_BSKH, masks, spec)
    # An empty row has no gradient, whatever arrives for its logsumexp of -inf.
    empty_BTN = jnp.isneginf(lse_BTN)
    delta_BTN = jnp.sum(out_BTNV.astype(jnp.float32) * d_out_BTNV.astype(jnp.float32), axis=-1)
    delta_BTN = jnp.where(empty_BTN, 0.0, delta_BTN - d_lse_BTN)
    lse_BTN = _finite(lse_BTN)

    q_IBKGtH, d_out_IBKGtV = _split_q(q_BTNH, tiles), _split_q(d_out_BTNV, tiles)
    k_JBKsH, v_JBKsV = _split_kv(k_BSKH, tiles), _split_kv(v_BSKV, tiles)
    lse_IBKGt1 = _split_q(lse_BTN[..., None], tiles)
    delta_IBKGt1 = _split_q(delta_BTN[..., None], tiles)

    def add(carry, pair):
        i, j = pair
        dq_IBKGtH, dk_JBKsH, dv_JBKsV, d_bias = carry
        q_BKGtH, d_out_BKGtV = _at(q_IBKGtH, i), _at(d_out_IBKGtV, i)
        lse_BKGt1, delta_BKGt1 = _at(lse_IBKGt1, i), _at(delta_IBKGt1, i)
        k_BKsH, v_BKsV = _at(k_JBKsH, j), _at(v_JBKsV, j)
        s_BKGts, slope_BKGts = tiles.scores(q_BKGtH, k_BKsH, i, j)
        p_BKGts = jnp.exp(s_BKGts - lse_BKGt1)
        dp_BKGts = einsum_f32("BKGtV,BKsV->BKGts", d_out_BKGtV, v_BKsV)
        ds_BKGts = p_BKGts * (dp_BKGts - delta_BKGt1)
        inner_BKGts = ds_BKGts if slope_BKGts is None else ds_BKGts * slope_BKGts
        inner_BKGts, p_BKGts = (x.astype(q_BKGtH.dtype) for x in (inner_BKGts, p_BKGts))
        dq_BKGtH = einsum_f32("BKGts,BKsH->BKGtH", inner_BKGts, k_BKsH)  # without the scale, as dk
        dk_BKsH = einsum_f32("BKGts,BKGtH->BKsH", inner_BKGts, q_BKGtH)
        dv_BKsV = einsum_f32("BKGts,BKGtV->BKsV", p_BKGts, d_out_BKGtV)
        if d_bias is not None:
            d_bias = _add_to_bias(d_bias, ds_BKGts, *tiles.bias_slice(i, j))
        return (
            _add_at(dq_IBKGtH, i, dq_BKGtH),
            _add_at(dk_JBKsH, j, dk_BKsH),
            _add_at(dv_JBKsV, j, dv_BKsV),
            d_bias,
        )

    f32_zeros = functools.partial(jnp.zeros_like, dtype=jnp.float32)
    d_bias = None if tiles.bias_BKGTS is None else f32_zeros(tiles.bias_BKGTS)
    carry = (f32_zeros(q_IBKGtH), f32_zeros(k_JBKsH), f32_zeros(v_JBKsV), d_bias)
    dq_IBKGtH, dk_JBKsH, dv_JBKsV, d_bias = _loop(add, carry, tiles)

    dq = (_join_q(dq_IBKGtH, tiles) * spec.scale).astype(q_BTNH.dtype)
    dk = (_join_kv(dk_JBKsH, tiles) * spec.scale).astype(k_BSKH.dtype)
    dv = _join_kv(dv_JBKsV, tiles).astype(v_BSKV.dtype)
    d_sinks = None
    if masks.sinks is not None:
        d_sinks = _sink_gradient(masks.sinks, lse_BTN, delta_BTN, empty_BTN)
    if masks.bias is not None and d_bias is not None:
        b, n, t, s = masks.bias.shape
        d_bias = d_bias[..., :t, :s].reshape(b, n, t, s).astype(masks.bias.dtype)
    return AttentionGradients(dq, dk, dv, d_sinks, d_bias)


def _add_to_bias(
    d_bias: jax.Array, ds_BKGts: jax.Array, start: tuple, sizes: tuple[int, ...]
) -> jax.Array:
    """Adds a tile's score gradients to the bias's, summed over dims that the bias broadcasts."""
    summed = tuple(d for d, size in enumerate(sizes) if size < ds_BKGts.shape[d])
    update = lax.dynamic_slice(d_bias, start, sizes)
    update += jnp.sum(ds_BKGts, axis=summed, keepdims=True)
    return lax.dynamic_update_slice(d_bias, update, start)


def _sink_gradient(
    sinks_N: jax.Array, lse_BTN: jax.Array, delta_BTN: jax.Array, empty_BTN: jax.Array
) -> jax.Array:
    """The sinks' gradient [N]: a sink's probability times (0 - delta), since its value is 0."""
    p_sink_BTN = jnp.exp(sinks_N[None, None] - lse_BTN)
    return -jnp.sum(jnp.where(empty_BTN, 0.0, p_sink_BTN) * delta_BTN, axis=(0, 1))
