"""From logits to the next token, by settings that are arrays: one row per sequence.

Dims: B batch, V vocabulary, K most likely tokens.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxinfra.core.errors import ConfigError

_TINY = float(np.finfo(np.float32).tiny)
_FEW = 256  # tokens that are found without a sort

NO_TOKEN = -1
"""Drawn in place of an id where a row's logits have a NaN, an infinity, or exclude every token."""


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """The settings of every row of a batch: arguments of a compiled step, not part of it."""

    temperature_B: jax.Array  # fp32; 0: greedy
    top_k_B: jax.Array  # int32; 0: all tokens
    top_p_B: jax.Array  # fp32; 1: all that top-k left

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig]) -> "SamplingRows":
        """One row for each config."""
        # Not under the smallest normal number: a device may flush what is smaller to 0, greedy.
        temperatures = [c.temperature and max(c.temperature, _TINY) for c in configs]
        top_ks = [min(c.top_k or 0, np.iinfo(np.int32).max) for c in configs]
        top_ps = [1.0 if c.top_p is None else max(c.top_p, _TINY) for c in configs]
        return cls(
            temperature_B=jnp.asarray(np.asarray(temperatures, np.float32)),
            top_k_B=jnp.asarray(top_ks, jnp.int32),
            top_p_B=jnp.asarray(np.asarray(top_ps, np.float32)),
        )


def sample(
    logits_BV: Float[Array, "B V"], keys_B: Key[Array, "B"], *, rows: SamplingRows
) -> Int[Array, "B"]:
    """Draws one token id per row, int32; it depends on the row's own logits, key and settings only.

    ``NO_TOKEN`` where there is nothing to draw from.

    Noise is drawn only where a row is not greedy, and the vocabulary is sorted only where a row
    cuts it: what no row of the batch asks for is compiled, and not run.

    Args:
        logits_BV: fp32; -inf excludes a token.
        keys_B: typed PRNG keys, one per row; not used by a greedy row.
    """
    is_drawn_B = rows.temperature_B > 0
    is_cut_B = is_drawn_B & ((rows.top_k_B > 0) | (rows.top_p_B < 1))
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # A NaN counts as the largest.
    largest_B = jnp.take_along_axis(logits_BV, greedy_B[:, None], axis=-1)[:, 0]

    def greedy() -> jax.Array:
        return greedy_B

    def drawn() -> jax.Array:
        scaled_BV, noise_BV = _scaled_and_noise(logits_BV, keys_B, rows.temperature_B)
        free_B = jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32)

        def cut() -> jax.Array:
            ranked_BV, ids_BV = _ranked(scaled_BV, jnp.where(is_cut_B, rows.top_k_B, 1))
            cut_B = jax.vmap(_draw_cut)(ranked_BV, ids_BV, noise_BV, rows.top_k_B, rows.top_p_B)
            return jnp.where(is_cut_B, cut_B, free_B)

        return jnp.where(is_drawn_B, jax.lax.cond(jnp.any(is_cut_B), cut, lambda: free_B), greedy_B)

    tokens_B = jax.lax.cond(jnp.any(is_drawn_B), drawn, greedy)
    return jnp.where(jnp.isfinite(largest_B), tokens_B, NO_TOKEN)


def _scaled_and_noise(
    logits_BV: jax.Array, keys_B: jax.Array, temperature_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits over temperature, and the Gumbel noise that is added to them before an argmax."""
    # Relative to the largest, so that a small temperature cannot overflow it.
    divisor_B1 = jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    scaled_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / divisor_B1
    # Noise belongs to ids, not ranks: cutting the tail changes only the draws that were in it.
    # "high": the default's 23 bits misjudge tokens less likely than 1e-7, of which there are many.

    def noise(key: jax.Array) -> jax.Array:
        return jax.random.gumbel(key, scaled_BV.shape[1:], scaled_BV.dtype, mode="high")

    return scaled_BV, jax.vmap(noise)(keys_B)


def _ranked(scaled_BV: jax.Array, top_k_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every row's logits from the most likely down, and their ids; lower ids first among equals.

    Where all rows keep few, what lies beyond those few is -inf instead: they are found without
    sorting the vocabulary.
    """
    num_ids = scaled_BV.shape[1]
    num_few = min(_FEW, num_ids)

    def few() -> tuple[jax.Array, jax.Array]:
        ranked_BK, ids_BK = jax.lax.top_k(scaled_BV, num_few)
        beyond = ((0, 0), (0, num_ids - num_few))
        return jnp.pad(ranked_BK, beyond, constant_values=-jnp.inf), jnp.pad(ids_BK, beyond)

    is_few = jnp.all((top_k_B > 0) & (top_k_B <= num_few))
    return jax.lax.cond(is_few, few, lambda: tuple(jax.lax.top_k(scaled_BV, num_ids)))


def _draw_cut(
    ranked_V: jax.Array, ids_V: jax.Array, noise_V: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """The draw among the tokens that top-k and top-p keep."""
    # What top-k cuts has a probability of 0 from here on.
    is_kept_V = (jnp.arange(ranked_V.size) < top_k) | (top_k == 0)
    ranked_V = jnp.where(is_kept_V, ranked_V, -jnp.inf)
    probabilities_V = jax.nn.softmax(ranked_V)
    more_likely_V = jnp.cumsum(probabilities_V) - probabilities_V
    # The first is always kept: nothing is more likely.
    is_kept_V = (more_likely_V < top_p) | (top_p >= 1)
    noisy_V = jnp.where(is_kept_V, ranked_V + noise_V[ids_V], -jnp.inf)
    return ids_V[jnp.argmax(noisy_V)].astype(jnp.int32)
