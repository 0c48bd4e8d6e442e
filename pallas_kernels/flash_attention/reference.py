"""Reference attention, with the whole score matrix in memory: the contract of all implementations.

Dims: B batch, T query, S key, N query heads, K kv heads, G query heads per kv head (N = K G),
H query and key width, V value width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32

from .spec import AttentionMasks, AttentionSpec, visible_BTS


def grouped_bias(bias: jax.Array, num_kv_heads: int) -> jax.Array:
    """Splits dim n of a bias [b, n, t, s] by kv heads: float32 [b, K or 1, G or 1, t, s]."""
    b, n, t, s = bias.shape
    k = num_kv_heads if n > 1 else 1
    return bias.astype(jnp.float32).reshape(b, k, n // k, t, s)


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    masks: AttentionMasks,
    *,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """Computes softmax(scores) v with scores = soft_cap(scale q k^T) + bias, softmax in float32.

    Differentiable by JAX itself; O(T S) memory.

    Returns:
        out [B, T, N, V] in q's dtype and logsumexp float32 [B, T, N]; a row that sees no key has
        out 0 and logsumexp -inf.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = einsum_f32("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * spec.scale
    if spec.logit_soft_cap is not None:
        s_BKGTS = spec.logit_soft_cap * jnp.tanh(s_BKGTS / spec.logit_soft_cap)
    if masks.bias is not None:
        s_BKGTS += jnp.broadcast_to(grouped_bias(masks.bias, K), s_BKGTS.shape)
    positions = {"q_positions_T": jnp.arange(T), "kv_positions_S": jnp.arange(S)}
    visible = visible_BTS(spec, masks, diagonal=S - T, **positions)
    if visible is not None:
        s_BKGTS = jnp.where(visible[:, None, None], s_BKGTS, -jnp.inf)

    m_BKGT1 = jnp.max(s_BKGTS, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks_1KG11 = None
    if masks.sinks is not None:
        sinks_1KG11 = masks.sinks.reshape(1, K, N // K, 1, 1)
        m_BKGT1 = jnp.maximum(m_BKGT1, sinks_1KG11)
    # Any finite shift gives the same softmax: an empty row takes 0, so that -inf - -inf never
    # appears, neither here nor in the gradient.
    m_BKGT1 = jax.lax.stop_gradient(jnp.where(jnp.isneginf(m_BKGT1), 0.0, m_BKGT1))
    p_BKGTS = jnp.exp(s_BKGTS - m_BKGT1)
    l_BKGT1 = jnp.sum(p_BKGTS, axis=-1, keepdims=True)
    if sinks_1KG11 is not None:
        l_BKGT1 += jnp.exp(sinks_1KG11 - m_BKGT1)
    empty_BKGT1 = l_BKGT1 == 0.0
    l_BKGT1 = jnp.where(empty_BKGT1, 1.0, l_BKGT1)
    p_BKGTS = (p_BKGTS / l_BKGT1).astype(v_BSKV.dtype)
    out_BTKGV = einsum_f32("BKGTS,BSKV->BTKGV", p_BKGTS, v_BSKV)
    lse_BKGT1 = jnp.where(empty_BKGT1, -jnp.inf, m_BKGT1 + jnp.log(l_BKGT1))
    lse_BTN = jnp.moveaxis(lse_BKGT1[..., 0], 3, 1).reshape(B, T, N)
    return out_BTKGV.reshape(B, T, N, v_BSKV.shape[3]).astype(q_BTNH.dtype), lse_BTN
