"""Rotary position embedding (RoPE): its base, and scalings for longer contexts, also of queries."""

import enum

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


@record
class LinearScaling:
    """Position interpolation: every frequency divided by ``factor`` (Chen et al. 2023)."""

    factor: float  # positions are divided by it


@record
class NtkScaling:
    """NTK-aware scaling: base multiplied by factor^(d/(d-2)), so high frequencies hardly change."""

    factor: float  # context length over that of pretraining


@record
class DynamicScaling:
    """NTK-aware scaling by as much as a sequence is longer than ``original_max_positions``.

    The base is multiplied by (factor * L/P - (factor - 1))^(d/(d-2)) for a sequence of L tokens and
    P positions, L > P. Up to P it is as trained, which is as far as an engine generates.
    """

    factor: float  # growth of the base with the length beyond the original context
    original_max_positions: int  # of pretraining


@record
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by ``factor``, high ones kept, a linear ramp between."""

    factor: float  # context length over that of pretraining
    low_frequency_factor: float  # fewer rotations in the original context: divided by factor
    high_frequency_factor: float  # more rotations than this: unchanged
    original_max_positions: int  # of pretraining


@record
class YarnScaling:
    """YaRN: interpolation by parts and a softmax temperature (Peng et al. 2023, section 3)."""

    factor: float  # context length over that of pretraining
    original_max_positions: int  # of pretraining
    beta_fast: float = 32.0  # with more rotations in that context a frequency is unchanged
    beta_slow: float = 1.0  # with fewer rotations it is divided by factor
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the ends of the ramp between them to whole dims


@record
class LongRopeScaling:
    """LongRoPE: each pair's frequency divided by its own factor (Ding et al. 2024; Phi-3).

    A sequence that stays within ``original_max_positions`` uses the short factors, a longer one the
    long factors at every position.
    """

    short_factors: tuple[float, ...]  # of each frequency, within the original context
    long_factors: tuple[float, ...]  # of each frequency, beyond it
    original_max_positions: int  # of pretraining
    attention_factor: float  # multiplies cos and sin


type RopeScaling = (
    LinearScaling | NtkScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling
)


class RopePairs(enum.StrEnum):
    """Pairs of a head's elements that are rotated together."""

    HALVES = "halves"  # i and i + d/2: GPT-NeoX, Llama as Hugging Face stores it
    NEIGHBOURS = "neighbours"  # 2i and 2i + 1: the paper, DeepSeek


@record
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), theta_i = theta^(-2i/d).

    Examples:
        >>> jaxinfra.RopeConfig(theta=500_000).fraction  # of a head's elements that are rotated
        1.0
    """

    theta: float = 10_000.0  # base of the frequencies
    scaling: RopeScaling | None = None  # to longer contexts; None: as trained
    fraction: float = 1.0  # leading fraction of each head's width that is rotated
    pairs: RopePairs = RopePairs.HALVES  # which two elements of a head are rotated together
    turning: float = 1.0  # leading fraction of these pairs that turn; the others keep 0: Gemma 4

    def rotary_dim(self, head_dim: int) -> int:
        """Number of elements of a head that are rotated."""
        return int(head_dim * self.fraction)


def check_rope(rope: RopeConfig, *, head_dim: int) -> None:
    """Raises ConfigError where heads of this width cannot be rotated by this embedding."""
    if rope.theta <= 1.0:
        raise ConfigError(f"rope theta={rope.theta} must exceed 1: pairs turn at theta^(-2i/d)")
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"rotary embedding of {rotary_dim} of head_dim={head_dim} elements (fraction="
            f"{rope.fraction}): it rotates pairs, so the number must be even, positive, no larger"
        )
    if not 0.0 < rope.turning <= 1.0:
        raise ConfigError(f"rope turning={rope.turning} must be above 0, and at most 1")
    scaling = rope.scaling
    if isinstance(scaling, NtkScaling | DynamicScaling) and rotary_dim == 2:
        raise ConfigError(
            f"{type(scaling).__name__} with rotary embedding of 2 elements: the base is stretched "
            "by factor^(d/(d-2)), so heads need more of them"
        )
    if isinstance(scaling, LongRopeScaling):
        for name in ("short_factors", "long_factors"):
            count = len(getattr(scaling, name))
            if count != rotary_dim // 2:
                raise ConfigError(
                    f"{name} has {count} entries; one for each of the {rotary_dim // 2} pairs "
                    "that are rotated is needed"
                )
    elif (
        isinstance(scaling, Llama3Scaling)
        and not 0.0 < scaling.low_frequency_factor <= scaling.high_frequency_factor
    ):
        raise ConfigError(
            f"rope scaling with low_frequency_factor={scaling.low_frequency_factor} and "
            f"high_frequency_factor={scaling.high_frequency_factor}: the first must be positive "
            "and at most the second, since a ramp goes from one to the other"
        )
    elif scaling is not None and scaling.factor < 1.0:
        raise ConfigError(
            f"rope scaling factor={scaling.factor} must be at least 1: it lengthens contexts"
        )


@record
class QueryScaling:
    """Growth of queries with their positions: 1 + rate * ln(1 + floor((position + first) / every)).

    Examples:
        >>> jaxinfra.QueryScaling(rate=0.1, every=8192, first=1)  # Llama 4's
        QueryScaling(rate=0.1, every=8192, first=1)
    """

    rate: float  # factor of the logarithm
    every: int  # positions between two values
    first: int = 0  # what the number of a sequence's first position is

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"query_scaling every={self.every} must be at least 1")
