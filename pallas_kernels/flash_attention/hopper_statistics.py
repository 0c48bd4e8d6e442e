"""What the backward kernels need to know of each query beside its vectors.

Dims: B batch, T query position, N query heads, H head width of value.
"""

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)


def row_statistics(
    out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array | None, padded: int
) -> tuple[jax.Array, jax.Array]:
    """Per query [B, N, padded]: logsumexp in log2 units, and delta = dO . O - d_lse.

    With P = exp(S - lse) and dP = dO V', dS = P * (dP - delta).
    """
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        delta = delta - d_lse.swapaxes(1, 2)
    # exp2(s - inf) = 0: rows without keys and rows past the end have no probabilities.
    lse2 = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E).swapaxes(1, 2)
    pad = ((0, 0), (0, 0), (0, padded - lse2.shape[2]))
    return jnp.pad(lse2, pad, constant_values=jnp.inf), jnp.pad(delta, pad)
