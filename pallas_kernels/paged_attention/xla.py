"""Paged attention in plain XLA: a loop over pages, with memory for a few pages only.

Dims: B row, T query, K kv heads, G query heads per kv head, M page of a row, S slot of a page, C
pages of a step, L key of a step (C S), H query and key width, V value width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.dot import einsum_f32

from .codes import numbers_of
from .spec import PagedCall

_KEYS = 512  # of a row, that are gathered at a time
_QUERIES = 128  # of a row, whose scores of these keys exist at a time


def paged_attention_xla(call: PagedCall) -> jax.Array:
    """Computes paged attention by a loop over pages; reads only pages that some query sees."""
    B, T, N, _ = call.q_BTNH.shape
    if T <= _QUERIES:
        return _attend(call, call.positions_BT())
    num_blocks = -(-T // _QUERIES)
    padding = ((0, 0), (0, num_blocks * _QUERIES - T))

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, num_blocks, _QUERIES, *x.shape[2:]), 1, 0)

    def block(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BTNH, positions_BT = operands
        return _attend(dataclasses.replace(call, q_BTNH=q_BTNH), positions_BT)

    q = blocks(jnp.pad(call.q_BTNH, (*padding, (0, 0), (0, 0))))
    positions = blocks(jnp.pad(call.positions_BT(), padding, constant_values=-1))
    out = jnp.moveaxis(lax.map(block, (q, positions)), 0, 1)
    return out.reshape(B, -1, N, call.value_width)[:, :T]


def _attend(call: PagedCall, positions_BT: jax.Array) -> jax.Array:
    B, T, N, H = call.q_BTNH.shape
    _, size, K, _ = call.k_PSKH.shape
    per_step = max(1, _KEYS // size)
    num_steps = -(-call.tables_BM.shape[1] // per_step)
    pad = num_steps * per_step - call.tables_BM.shape[1]
    tables_BM = jnp.pad(call.tables_BM, ((0, 0), (0, pad)))
    q_BTKGH = call.q_BTNH.reshape(B, T, K, N // K, H)
    scale, cap, window = call.spec.scale, call.spec.soft_cap, call.spec.window

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak_BTKG, total_BTKG, out_BTKGV = carry
        pages_BC = lax.dynamic_slice_in_dim(tables_BM, i * per_step, per_step, axis=1)
        keys_L = i * per_step * size + jnp.arange(per_step * size)
        # What nobody put there may be anything, even NaN, and 0 * NaN is none.
        there_BL11 = (keys_L[None, :] < call.lengths_B[:, None])[:, :, None, None]

        def gathered(pages: jax.Array, scale_PSK: jax.Array | None) -> jax.Array:
            x = pages[pages_BC].reshape(B, per_step * size, *pages.shape[2:])
            if call.code is not None and scale_PSK is not None:
                scale_BLK = scale_PSK[pages_BC].reshape(B, per_step * size, K)
                x = numbers_of(x, scale_BLK, call.code, call.q_BTNH.dtype)
            return jnp.where(there_BL11, x, 0)

        k_BLKH = gathered(call.k_PSKH, call.k_scale_PSK)
        v_BLKV = gathered(call.v_PSKV, call.v_scale_PSK)
        s_BTKGL = einsum_f32("BTKGH,BLKH->BTKGL", q_BTKGH, k_BLKH) * scale
        if cap is not None:
            s_BTKGL = cap * jnp.tanh(s_BTKGL / cap)
        seen_BTL = call.visible(positions_BT[:, :, None], keys_L[None, None, :])
        s_BTKGL = jnp.where(seen_BTL[:, :, None, None], s_BTKGL, -jnp.inf)
        top_BTKG = jnp.maximum(peak_BTKG, jnp.max(s_BTKGL, axis=-1))
        # A query that has seen nothing yet keeps -inf, which must not meet itself.
        shift_BTKG = jnp.where(jnp.isneginf(top_BTKG), 0.0, top_BTKG)
        p_BTKGL = jnp.exp(s_BTKGL - shift_BTKG[..., None])
        shrink_BTKG = jnp.exp(peak_BTKG - shift_BTKG)
        part_BTKGV = einsum_f32("BTKGL,BLKV->BTKGV", p_BTKGL.astype(v_BLKV.dtype), v_BLKV)
        total_BTKG = total_BTKG * shrink_BTKG + jnp.sum(p_BTKGL, axis=-1)
        return top_BTKG, total_BTKG, out_BTKGV * shrink_BTKG[..., None] + part_BTKGV

    least, most = jnp.min(positions_BT, where=positions_BT >= 0, initial=2**30), positions_BT.max()
    first = jnp.int32(0) if window is None else jnp.maximum(least - (window - 1), 0)
    shape = q_BTKGH.shape[:4]
    peak_BTKG, total_BTKG, out_BTKGV = lax.fori_loop(
        first // (per_step * size),
        (most + per_step * size) // (per_step * size),
        step,
        (
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, call.value_width), jnp.float32),
        ),
    )
    if call.sinks_N is not None:
        sinks_11KG = call.sinks_N.reshape(1, 1, K, N // K)
        total_BTKG, out_BTKGV = _with_sinks(sinks_11KG, peak_BTKG, total_BTKG, out_BTKGV)
    out_BTKGV = out_BTKGV / jnp.where(total_BTKG == 0.0, 1.0, total_BTKG)[..., None]
    return out_BTKGV.reshape(B, T, N, -1).astype(call.q_BTNH.dtype)


def _with_sinks(
    sinks_11KG: jax.Array, peak_BTKG: jax.Array, total_BTKG: jax.Array, out_BTKGV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax's total and the unscaled output once each head's sink has joined the softmax."""
    top_BTKG = jnp.maximum(peak_BTKG, sinks_11KG)
    shrink_BTKG = jnp.exp(peak_BTKG - top_BTKG)
    total_BTKG = total_BTKG * shrink_BTKG + jnp.exp(sinks_11KG - top_BTKG)
    return total_BTKG, out_BTKGV * shrink_BTKG[..., None]
