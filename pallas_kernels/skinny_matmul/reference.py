"""The formula. Dims: M row, K contracted, N column of the weight."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32


def skinny_matmul_reference(x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool) -> jax.Array:
    """``x w`` summed in fp32; with ``swiglu``, silu of its first half times its second."""
    product_MN = einsum_f32("mk,kn->mn", x_MK, w_KN)
    if swiglu:
        gate_MF, up_MF = jnp.split(product_MN, 2, axis=1)
        product_MN = jax.nn.silu(gate_MF) * up_MF
    return product_MN.astype(x_MK.dtype)
