"""What a decoder is: shapes and choices of every layer, nothing about how or where it runs."""

import dataclasses
import enum

from jaxinfra.core.errors import ConfigError


class NormKind(enum.StrEnum):
    """Which normalization a block uses."""

    RMS = "rms"  # Zhang and Sennrich 2019
    LAYER = "layer"  # Ba et al. 2016


class NormPlacement(enum.StrEnum):
    """Where a block normalizes."""

    PRE = "pre"  # x + f(norm(x)): GPT-2, Llama
    SANDWICH = "sandwich"  # x + norm(f(norm(x))): Gemma-2


class MlpKind(enum.StrEnum):
    """The activation of the feed-forward layer, gated ones first (Shazeer 2020)."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"  # GELU by its tanh approximation: Gemma
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # GPT-2

    @property
    def gated(self) -> bool:
        """Whether the layer has a gate projection beside the up projection."""
        return self in (MlpKind.SWIGLU, MlpKind.GEGLU, MlpKind.GEGLU_TANH)


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021), theta_i = theta^(-2i/d), halves rotated."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    fraction: float = 1.0  # of each head's width that is rotated, from its front; the rest is kept

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's elements are rotated."""
        return int(head_dim * self.fraction)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """A normalization layer."""

    kind: NormKind = NormKind.RMS
    epsilon: float = 1e-5
    bias: bool = False
    scale_offset: float = 0.0  # Gemma multiplies by (1 + scale): 1.0

    def __post_init__(self) -> None:
        if self.epsilon <= 0.0:
            raise ConfigError(f"norm epsilon={self.epsilon} must be positive: zeros divide by it")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Self-attention: MHA (kv heads = query heads), GQA, MQA (one kv head)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    window: int | None = None  # a query sees itself and the window-1 tokens before it
    logit_soft_cap: float | None = None  # cap * tanh(score / cap): Gemma-2
    scale: float | None = None  # multiplies scores; None: head_dim^-0.5
    qk_norm: NormConfig | None = None  # over head_dim, before rotary: Qwen3
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        q, k = self.num_q_heads, self.num_kv_heads
        if q < 1 or k < 1 or q % k:
            raise ConfigError(
                f"num_q_heads={q} is not a multiple of num_kv_heads={k}; "
                "query heads share key/value heads in equal groups"
            )
        if self.head_dim < 1:
            raise ConfigError(f"head_dim={self.head_dim} must be positive")
        if self.rope is not None:
            _check_rope(self.rope, head_dim=self.head_dim)
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1 (a token sees itself)")
        _check_cap(self.logit_soft_cap)


def _check_cap(cap: float | None) -> None:
    if cap is not None and cap <= 0.0:
        raise ConfigError(f"logit_soft_cap={cap} must be positive, or none")


def _check_rope(rope: RopeConfig, *, head_dim: int) -> None:
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """The feed-forward layer."""

    hidden_dim: int
    kind: MlpKind = MlpKind.SWIGLU
    bias: bool = False

    def __post_init__(self) -> None:
        if self.hidden_dim < 1:
            raise ConfigError(f"mlp hidden_dim={self.hidden_dim} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig:
    """One transformer block: attention, then mlp, each on a residual branch."""

    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig = NormConfig()
    norm_placement: NormPlacement = NormPlacement.PRE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only language model.

    ``blocks`` is the repeating pattern: layer i is built from ``blocks[i % len(blocks)]``. One
    entry serves a uniform model, two serve Gemma-2's alternating windows.
    """

    vocab_size: int
    model_dim: int
    num_layers: int
    max_positions: int
    blocks: tuple[BlockConfig, ...]
    tie_embeddings: bool
    learned_positions: bool = False
    embedding_scale: float = 1.0  # Gemma: sqrt(model_dim)
    final_norm: NormConfig = NormConfig()
    logit_soft_cap: float | None = None
    dropout_rate: float = 0.0  # on embeddings and residual branches, in training only
    # Weights are drawn from N(0, init_std); projections back into the residual stream from
    # N(0, init_std / sqrt(2 num_layers)), so that its variance does not grow with depth (GPT-2).
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if not self.blocks or self.num_layers < 1 or self.num_layers % len(self.blocks):
            raise ConfigError(
                f"num_layers={self.num_layers} is not a multiple of the block pattern's length "
                f"{len(self.blocks)}; layers are scanned in whole repetitions of the pattern"
            )
        for name in ("vocab_size", "model_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ConfigError(f"dropout_rate={self.dropout_rate} must lie in [0, 1)")
        if self.init_std <= 0.0:
            raise ConfigError(f"init_std={self.init_std} must be positive: zeros never learn")
        _check_cap(self.logit_soft_cap)

    @property
    def num_groups(self) -> int:
        """Repetitions of the block pattern: the length of the scan over layers."""
        return self.num_layers // len(self.blocks)
