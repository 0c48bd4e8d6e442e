"""Keys and values of all heads from latents (DeepSeek-V2, arXiv 2405.04434, equations 9 to 16).

Dims: B batch, T position, N heads, H head width, P rotated width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfra.config.model import LatentAttentionConfig


def expanded(
    up_BTNH: Float[Array, "B T N H"],
    key_BTP: Float[Array, "B T P"],
    *,
    config: LatentAttentionConfig,
) -> tuple[Float[Array, "B T N Hk"], Float[Array, "B T N Hv"]]:
    """Builds all heads' keys and values from products of the latents and the shared rotated key.

    Args:
        up_BTNH: the latents times their weight: each head's key without position, then its value.
        key_BTP: the rotated key that all heads share.
    """
    nope_BTNH, v_BTNH = jnp.split(up_BTNH, [config.nope_dim], axis=-1)
    shared_BTNP = jnp.broadcast_to(key_BTP[:, :, None], (*nope_BTNH.shape[:-1], key_BTP.shape[-1]))
    return jnp.concatenate([nope_BTNH, shared_BTNP], axis=-1), v_BTNH
