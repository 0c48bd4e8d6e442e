"""Rotary position embedding and its scalings for longer contexts.

Dims: B batch, T position, N heads, H head width, R rotated pairs (H/2 unless
a fraction of the head is rotated).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfra.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    RopeConfig,
    RopePairs,
    YarnScaling,
)
from jaxinfra.numerics.exact import pinned, rounded

type RopeTable = tuple[Float[Array, "_ T _"], Float[Array, "_ T _"]]
"""cos and sin of every position's angles, fp32 [B, T, R], where layers' heads may differ in R."""


def rope_frequencies(
    config: RopeConfig, *, head_dim: int, long: bool = False
) -> tuple[np.ndarray, float]:
    """Computes RoPE's angle per position for each pair, float64 [R], and a factor on cos and sin.

    theta_i = theta^(-2i/d) (Su et al. 2021, equation 15), then the config's scaling.

    Args:
        long: whether the sequence exceeds the original context (LongRoPE only).
    """
    rotary_dim = config.rotary_dim(head_dim)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    plain = config.theta**-exponents
    plain[int(config.turning * rotary_dim // 2) :] = 0.0
    match config.scaling:
        case None | DynamicScaling():  # within the original context
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case NtkScaling(factor=factor):
            stretched = config.theta * factor ** (rotary_dim / (rotary_dim - 2))
            return stretched**-exponents, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, theta=config.theta, rotary_dim=rotary_dim)
        case LongRopeScaling() as scaling:
            factors = scaling.long_factors if long else scaling.short_factors
            return plain / np.array(factors), scaling.attention_factor


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    # How often a pair turns over the original context decides whether it is kept or divided.
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if low == high:  # no ramp: Llama 4
        return np.where(turns > high, plain, plain / scaling.factor)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor


def _yarn(
    plain: np.ndarray, scaling: YarnScaling, *, theta: float, rotary_dim: int
) -> tuple[np.ndarray, float]:
    def pair_turning(times: float) -> float:
        """The (real) pair index that rotates this many times over the original context."""
        positions = scaling.original_max_positions / (times * 2 * math.pi)
        return rotary_dim * math.log(positions) / (2 * math.log(theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # the reference code's guard against an empty ramp
    ramp = np.clip((np.arange(rotary_dim // 2) - first) / (last - first), 0.0, 1.0)
    frequencies = (1.0 - ramp) * plain + ramp * plain / scaling.factor
    temperature = scaling.attention_factor
    if temperature is None:
        temperature = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies, temperature


def rope_table(
    config: RopeConfig,
    *,
    head_dim: int,
    positions_BT: jax.Array,
    contexts_B: jax.Array | None = None,
    is_exact: bool = False,
) -> RopeTable:
    """Computes RoPE's cos and sin at these positions, for all layers with this config.

    Args:
        contexts_B: length of each row in tokens, by which LongRoPE and dynamic scaling choose the
            row's frequencies; by default the row's largest position plus 1.
        is_exact: whether an angle has the same bits in every program.
    """
    if is_exact:
        # Or positions that are constants would be computed by the compiler, with other functions.
        positions_BT = jax.lax.optimization_barrier(positions_BT)
    frequencies, factor = rope_frequencies(config, head_dim=head_dim)
    frequencies_R = jnp.asarray(frequencies, dtype=np.float32)
    frequencies_BTR = frequencies_R[None, None, :]
    if isinstance(config.scaling, LongRopeScaling | DynamicScaling):
        if contexts_B is None:
            contexts_B = jnp.max(positions_BT, axis=1) + 1
        frequencies_BTR = _by_context(config, head_dim, frequencies_BTR, contexts_B)
    angles_BTR = positions_BT.astype(frequencies_R.dtype)[..., None] * frequencies_BTR
    if is_exact:
        angles_BTR = pinned(angles_BTR)
    return factor * jnp.cos(angles_BTR), factor * jnp.sin(angles_BTR)


def _by_context(
    config: RopeConfig, head_dim: int, plain_BTR: jax.Array, contexts_B: jax.Array
) -> jax.Array:
    """Returns each row's frequencies, which depend on its length."""
    contexts_BTR = contexts_B[:, None, None]
    if isinstance(config.scaling, DynamicScaling):
        original, factor = config.scaling.original_max_positions, config.scaling.factor
        longer_BTR = jnp.maximum(contexts_BTR, original).astype(plain_BTR.dtype) / original
        stretch_BTR = factor * longer_BTR - (factor - 1.0)
        rotary_dim = config.rotary_dim(head_dim)
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / (rotary_dim - 2)
        return plain_BTR * stretch_BTR ** -jnp.asarray(exponents)[None, None, :]
    assert isinstance(config.scaling, LongRopeScaling), "rope_table"
    long, _ = rope_frequencies(config, head_dim=head_dim, long=True)
    return jnp.where(
        contexts_BTR > config.scaling.original_max_positions,
        jnp.asarray(long, dtype=np.float32)[None, None, :],
        plain_BTR,
    )


def apply_rope(
    x_BTNH: Float[Array, "B T N H"],
    table: RopeTable,
    *,
    pairs: RopePairs = RopePairs.HALVES,
    is_exact: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotates each head's first 2R elements in pairs, (i, i + R) or (2i, 2i + 1).

    The rotation is computed in fp32 and returned in x's dtype.

    Args:
        is_exact: whether a result has the same bits in every program.
    """
    cos_BT1R, sin_BT1R = (part[:, :, None, :] for part in table)
    num_pairs = cos_BT1R.shape[-1]
    turned, kept = x_BTNH[..., : 2 * num_pairs], x_BTNH[..., 2 * num_pairs :]
    turned = turned.astype(cos_BT1R.dtype)
    if pairs is RopePairs.HALVES:
        first, second = jnp.split(turned, 2, axis=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    products = (first * cos_BT1R, second * sin_BT1R, second * cos_BT1R, first * sin_BT1R)
    if is_exact:
        products = tuple(map(pinned, products))
    rotated = (products[0] - products[1], products[2] + products[3])
    if pairs is RopePairs.HALVES:
        rotated = jnp.concatenate(rotated, axis=-1)
    else:
        rotated = jnp.stack(rotated, axis=-1).reshape(turned.shape)
    rotated = (rounded if is_exact else jax.lax.convert_element_type)(rotated, x_BTNH.dtype)
    return jnp.concatenate([rotated, kept], axis=-1) if kept.shape[-1] else rotated
