"""The formula. Dims: M row, K contracted, N column of the weight."""

import jax
import jax.numpy as jnp


def skinny_matmul_reference(x_MK: jax.Array, w_KN: jax.Array, *, swiglu: bool) -> jax.Array:
    """``x w`` summed in fp32; with ``swiglu``, silu of its first half times its second."""
    product_MN = jax.lax.dot_general(
        x_MK, w_KN, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    if swiglu:
        gate_MF, up_MF = jnp.split(product_MN, 2, axis=1)
        product_MN = jax.nn.silu(gate_MF) * up_MF
    return product_MN.astype(x_MK.dtype)
