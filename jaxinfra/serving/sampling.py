"""From logits to the next token.

Dims: B batch, V vocabulary, K tokens kept, most likely first.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxinfra.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How a token is drawn: temperature first, then top-k, then top-p of what top-k left.

    A temperature of 0 is greedy: the most likely token, the lowest id among equals.
    """

    temperature: float = 1.0
    top_k: int | None = None  # keep the k most likely, lower ids first among equals
    top_p: float | None = None  # keep the fewest whose probabilities reach p (Holtzman et al. 2020)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature} must be 0 (greedy) or a positive number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be at least 1; leave it out to keep all")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]; leave it out to keep all")


GREEDY = SamplingConfig(temperature=0.0)


def sample(
    logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], *, config: SamplingConfig
) -> Int[Array, "B"]:
    """Draws one token id a row, int32; a row's draw depends on its own logits and key only.

    Args:
        logits_BV: fp32; -inf excludes a token.
        keys_B: typed PRNG keys, one a row; not used when greedy.
        config: static under jit.
    """
    if config.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(functools.partial(_draw, config=config))(logits_BV, keys_B)


def _draw(logits_V: jax.Array, key: jax.Array, *, config: SamplingConfig) -> jax.Array:
    """argmax(logits / temperature + Gumbel noise) over the tokens kept."""
    # Relative to the largest, so that a small temperature cannot overflow it; and not under the
    # smallest normal number, because 0 divided by what a device flushes to 0 is NaN.
    temperature = max(config.temperature, float(jnp.finfo(logits_V.dtype).tiny))
    scaled_V = (logits_V - jnp.max(logits_V)) / temperature
    # Noise belongs to ids, not ranks: cutting the tail changes only the draws that were in it.
    # "high": the default's 23 bits misjudge tokens less likely than 1e-7, of which there are many.
    noise_V = jax.random.gumbel(key, scaled_V.shape, scaled_V.dtype, mode="high")
    if config.top_k is None and config.top_p in (None, 1.0):
        return jnp.argmax(scaled_V + noise_V).astype(jnp.int32)
    num_kept = min(config.top_k or scaled_V.size, scaled_V.size)
    scaled_K, ids_K = jax.lax.top_k(scaled_V, num_kept)
    noisy_K = scaled_K + noise_V[ids_K]
    if config.top_p is not None and config.top_p < 1.0:
        probabilities_K = jax.nn.softmax(scaled_K)
        more_likely_K = jnp.cumsum(probabilities_K) - probabilities_K
        # The first is always kept: nothing is more likely.
        noisy_K = jnp.where(more_likely_K < config.top_p, noisy_K, -jnp.inf)
    return ids_K[jnp.argmax(noisy_K)].astype(jnp.int32)
