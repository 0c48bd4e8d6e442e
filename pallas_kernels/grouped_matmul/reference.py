"""Grouped products in plain jnp, every row with every group's weight; others must match them.

Dims: M row, G group, K width in, N width out.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32

from .formulas import dequantized_operands


def grouped_matmul_reference(
    x: jax.Array,
    w_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None = None,
) -> jax.Array:
    """Multiplies row m by the weight of its group: fp32 [M, N], 0 where m has no group.

    Differentiable by JAX; memory M * G * N.
    """
    x_MK, rounded_GKN = x.astype(jnp.float32), w_GKN.astype(x.dtype).astype(jnp.float32)
    # The rounded weights to the last bit, with the gradient of those that were not.
    w_GKN = w_GKN.astype(jnp.float32)
    w_GKN += jax.lax.stop_gradient(rounded_GKN - w_GKN)
    x_MK = x_MK if rows_M is None else x_MK[rows_M]
    ends_1G = jnp.cumsum(group_sizes_G)[None]
    m_M1 = jnp.arange(x_MK.shape[0], dtype=jnp.int32)[:, None]
    is_in_MG = (ends_1G - group_sizes_G[None] <= m_M1) & (m_M1 < ends_1G)
    # Before the product, so that what lies beyond the groups may be NaN, in its gradient too.
    x_MK = jnp.where(jnp.any(is_in_MG, axis=1, keepdims=True), x_MK, 0.0)
    product_MGN = einsum_f32("MK,GKN->MGN", x_MK, w_GKN)
    return jnp.sum(jnp.where(is_in_MG[..., None], product_MGN, 0.0), axis=1)


def grouped_swiglu_reference(
    x: jax.Array,
    gate_GKN: jax.Array,
    up_GKN: jax.Array,
    group_sizes_G: jax.Array,
    rows_M: jax.Array | None = None,
) -> jax.Array:
    """Computes silu(x gate) * (x up), each row with its group's weights: fp32 [M, N]."""
    gate_MN = grouped_matmul_reference(x, gate_GKN, group_sizes_G, rows_M)
    return jax.nn.silu(gate_MN) * grouped_matmul_reference(x, up_GKN, group_sizes_G, rows_M)


def scaled_grouped_matmul_reference(
    a_MK: jax.Array,
    b_GNK: jax.Array,
    a_scale_JM: jax.Array,
    b_scale_GJI: jax.Array,
    group_sizes_G: jax.Array,
) -> jax.Array:
    """Dequantizes 8-bit operands, then multiplies rows by their group's weight: fp32 [M, N]."""
    a_MK, b_GNK = dequantized_operands(a_MK, b_GNK, a_scale_JM, b_scale_GJI)
    return grouped_matmul_reference(a_MK, jnp.swapaxes(b_GNK, 1, 2), group_sizes_G)
