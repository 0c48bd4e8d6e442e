"""Noise that makes an argmax of logits a draw (Gumbel 1954; Maddison et al. 2014, "A* sampling").

Dims: B batch, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Key, UInt32

_BELOW_ONE = np.float32(1.0 - 2.0**-24)


def gumbel_noise(keys_B: Key[Array, "B"], num_ids: int) -> Float[Array, "B V"]:
    """Independent noise for each row and id, fp32 [B, V]: a function of the row's key and the id.

    64 bits each, a block of the keys' own cipher (Salmon et al. 2011), so that nothing but
    arithmetic is between a key and its argmax. ``jax.random.gumbel`` has 23 bits, which misjudge
    tokens less likely than 1e-7, of which there are many; its mode "high" has 46 from two blocks,
    which XLA for GPUs writes to memory in between.
    """
    words_B2 = jax.random.key_data(keys_B)
    shape = len(words_B2), num_ids
    key = (jnp.broadcast_to(words_B2[:, place, None], shape) for place in range(2))
    ids_BV = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return gumbel_of_bits(*threefry2x32_p.bind(*key, jnp.zeros_like(ids_BV), ids_BV))


def gumbel_of_bits(
    high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """``-log(-log(1 - x))`` of x = (2**32 high + low + 1/2) / 2**64, in fp32.

    The largest noise comes from x near 0, which has all digits of fp32 there; 45 is the most.
    """
    unit, half = np.float32(2.0**-32), np.float32(0.5)
    x = high.astype(unit.dtype) * unit + (low.astype(unit.dtype) + half) * unit**2
    # The largest 25 bits would round to 1, whose noise is -inf, as of a token that is excluded.
    return -jnp.log(-jnp.log1p(-jnp.minimum(x, _BELOW_ONE)))
