"""Check of the operands, shared by all rungs."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError


def check_operands(
    a_MK: jax.Array, b_KN: jax.Array, *, tile_m: int, tile_n: int, tile_k: int
) -> tuple[int, int, int]:
    """M, N, K of a product that a rung can compute.

    Raises:
        InputError: the operands are not matrices that can be multiplied.
        UnsupportedError: not bf16, or sizes that are not multiples of the rung's tile.
    """
    if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
        raise InputError(f"ladder: a {a_MK.shape} and b {b_KN.shape} are not [M, K] and [K, N]")
    (M, K), N = a_MK.shape, b_KN.shape[1]
    if (a_MK.dtype, b_KN.dtype) != (jnp.bfloat16, jnp.bfloat16):
        raise UnsupportedError(
            f"ladder: {a_MK.dtype} times {b_KN.dtype}; rungs multiply bfloat16, others jnp.matmul"
        )
    if M % tile_m or N % tile_n or K % tile_k:
        raise UnsupportedError(
            f"ladder: M={M} N={N} K={K} are not multiples of this rung's tile "
            f"{tile_m} x {tile_n} x {tile_k}; pad the operands, or use jnp.matmul"
        )
    return M, N, K
