"""Reference of paged attention, which gathers all pages of all rows: the contract of the kernels.

Dims: B row, T query, N query heads, K kv heads, G query heads per kv head (N = K G), M page of a
row, S slot of a page, L key of a row (M S), H query and key width, V value width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32

from .codes import numbers_of
from .spec import PagedCall


def paged_attention_reference(call: PagedCall) -> jax.Array:
    """Computes softmax(soft_cap(scale q k^T)) v over each query's keys, [B, T, N, V] in q's dtype.

    The softmax is fp32; a sink adds exp(sink) to its denominator. The result of a query that sees
    no key is 0.
    """
    B, T, N, H = call.q_BTNH.shape
    K = call.k_PSKH.shape[2]
    k_BLKH, v_BLKV = rows(call)
    q_BTKGH = call.q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTL = einsum_f32("BTKGH,BLKH->BKGTL", q_BTKGH, k_BLKH) * call.spec.scale
    if call.spec.soft_cap is not None:
        s_BKGTL = call.spec.soft_cap * jnp.tanh(s_BKGTL / call.spec.soft_cap)
    keys_L = jnp.arange(k_BLKH.shape[1])
    visible_BTL = call.visible(call.positions_BT()[:, :, None], keys_L[None, None, :])
    s_BKGTL = jnp.where(visible_BTL[:, None, None], s_BKGTL, -jnp.inf)
    peak_BKGT1 = jnp.max(s_BKGTL, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks_1KG11 = None
    if call.sinks_N is not None:
        sinks_1KG11 = call.sinks_N.reshape(1, K, N // K, 1, 1)
        peak_BKGT1 = jnp.maximum(peak_BKGT1, sinks_1KG11)
    peak_BKGT1 = jnp.where(jnp.isneginf(peak_BKGT1), 0.0, peak_BKGT1)
    p_BKGTL = jnp.exp(s_BKGTL - peak_BKGT1)
    total_BKGT1 = jnp.sum(p_BKGTL, axis=-1, keepdims=True)
    if sinks_1KG11 is not None:
        total_BKGT1 += jnp.exp(sinks_1KG11 - peak_BKGT1)
    total_BKGT1 = jnp.where(total_BKGT1 == 0.0, 1.0, total_BKGT1)
    p_BKGTL = (p_BKGTL / total_BKGT1).astype(v_BLKV.dtype)
    out_BTKGV = einsum_f32("BKGTL,BLKV->BTKGV", p_BKGTL, v_BLKV)
    return out_BTKGV.reshape(B, T, N, -1).astype(call.q_BTNH.dtype)


def rows(call: PagedCall) -> tuple[jax.Array, jax.Array]:
    """Gathers each row's keys [B, L, K, H] and values [B, L, K, V] by position, 0 past its end."""
    B, M = call.tables_BM.shape
    size = call.k_PSKH.shape[1]
    there_BL = jnp.arange(M * size)[None, :] < call.lengths_B[:, None]

    def gathered(pages: jax.Array, scale_PSK: jax.Array | None) -> jax.Array:
        x = pages[call.tables_BM].reshape(B, M * size, *pages.shape[2:])
        if call.code is not None and scale_PSK is not None:
            scale_BLK = scale_PSK[call.tables_BM].reshape(B, M * size, -1)
            x = numbers_of(x, scale_BLK, call.code, call.q_BTNH.dtype)
        return jnp.where(there_BL[:, :, None, None], x, 0)

    return gathered(call.k_PSKH, call.k_scale_PSK), gathered(call.v_PSKV, call.v_scale_PSK)
