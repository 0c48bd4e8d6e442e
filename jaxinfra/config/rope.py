"""Rotary position embedding: its base, and the scalings that lengthen contexts."""

import dataclasses
import enum

from jaxinfra.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency divided by ``factor`` (Chen et al. 2023)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NtkScaling:
    """NTK-aware scaling: base multiplied by factor^(d/(d-2)), so high frequencies stay."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by ``factor``, high ones kept, a linear ramp between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN: interpolation by parts and a softmax temperature (Peng et al. 2023, section 3)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the ramp's ends to whole dims, as the reference code does


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeScaling:
    """LongRoPE: each pair's frequency divided by its own factor (Ding et al. 2024; Phi-3).

    A sequence that stays within ``original_max_positions`` uses the short factors, a longer one the
    long factors at every position.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float  # multiplies cos and sin


type RopeScaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling | LongRopeScaling


class RopePairs(enum.StrEnum):
    """Which elements of a head are turned together."""

    HALVES = "halves"  # i and i + d/2: GPT-NeoX, Llama as Hugging Face stores it
    NEIGHBOURS = "neighbours"  # 2i and 2i + 1: the paper, DeepSeek


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), theta_i = theta^(-2i/d)."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    fraction: float = 1.0  # of each head's width that is rotated, from its front; the rest is kept
    pairs: RopePairs = RopePairs.HALVES

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's elements are rotated."""
        return int(head_dim * self.fraction)


def check_rope(rope: RopeConfig, *, head_dim: int) -> None:
    """Raises ConfigError where heads of this width cannot be rotated so."""
    if rope.theta <= 1.0:
        raise ConfigError(f"rope theta={rope.theta} must exceed 1: pairs turn at theta^(-2i/d)")
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"rotary embedding of {rotary_dim} of head_dim={head_dim} elements (fraction="
            f"{rope.fraction}): it turns pairs, so the number must be even, positive and no larger"
        )
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        for name in ("short_factors", "long_factors"):
            count = len(getattr(scaling, name))
            if count != rotary_dim // 2:
                raise ConfigError(
                    f"{name} has {count} entries; one for each of the {rotary_dim // 2} pairs "
                    "that are rotated is needed"
                )
    elif scaling is not None and scaling.factor < 1.0:
        raise ConfigError(
            f"rope scaling factor={scaling.factor} must be at least 1: it lengthens contexts"
        )
