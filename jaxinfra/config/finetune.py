"""Settings of fine-tuning: the weights to start from, and the part of them to train."""

import enum
import math

from jaxinfra.config.limits import require_within
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError, nearest

PROJECTIONS = (
    *("query", "key", "value", "out", "gate", "up", "down"),
    *("query_down", "query_up", "kv_down", "kv_up"),  # of latent attention
    # Of gated attention, and of layers with a state; such a layer's gate goes by "gate" too.
    *("out_gate", "in_gate", "gate_down", "beta", "decay", "decay_down", "step", "step_down"),
)
"""Projections of a block, which low-rank adapters may be put beside."""


@record
class InitConfig:
    """The weights that a run starts from."""

    path: str  # a Hugging Face directory, a converted model or a run
    sha256: str  # checksum of the weights; a resumed run refuses others
    step: int | None = None  # step of the checkpoint, if path is a run


class AdapterKind(enum.StrEnum):
    """Kinds of adapters beside a frozen weight W, with s the config's ``scale``."""

    LORA = "lora"  # W + s B A (Hu et al. 2021)
    # W + s B A, normalized per output, times a trained length per output (Liu et al. 2024).
    DORA = "dora"


class BaseWeights(enum.StrEnum):
    """Formats in which devices store frozen weights while adapters are trained."""

    COMPUTE = "compute"  # in the compute dtype
    NF4 = "nf4"  # blocks of 64 inputs, scales in fp32: 0.56 bytes per element (QLoRA)
    NF4_DOUBLE = "nf4_double"  # the same with 8-bit scales: 0.52 bytes per element
    INT4 = "int4"  # blocks of 64 inputs, scales in fp32: 0.56 bytes per element
    INT8 = "int8"  # one scale per output: 1 byte per element


class AdapterScaling(enum.StrEnum):
    """Rules that give the factor s of an adapter's update s B A, from alpha and rank."""

    STANDARD = "standard"  # alpha / rank
    RSLORA = "rslora"  # alpha / sqrt(rank): updates as large at any rank (Kalajdzievski 2023)


@record
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): y = W x + s B A x, W frozen.

    Raises:
        ConfigError: a rank below 1, or a target that is not a projection.

    Examples:
        >>> lora = jaxinfra.LoraConfig(rank=4, targets=("query", "key", "value", "out"))
        >>> lora.scale
        4.0
    """

    rank: int = 8  # inner width of an adapter
    alpha: float = 16.0  # strength; the factor s is alpha / rank
    targets: tuple[str, ...] = ("query", "value")  # projections that get an adapter
    kind: AdapterKind = AdapterKind.LORA  # dora also trains the length of each output's weights
    scaling: AdapterScaling = AdapterScaling.STANDARD  # rslora: s is alpha / sqrt(rank)
    dropout: float = 0.0  # rate on the adapters' inputs, in training only
    base: BaseWeights = BaseWeights.COMPUTE  # storage of frozen projections: nf4 for QLoRA

    def __post_init__(self) -> None:
        if self.rank < 1 or not (0.0 < self.alpha < math.inf):
            raise ConfigError(
                f"lora rank={self.rank} must be at least 1 and alpha={self.alpha} positive"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora dropout={self.dropout} must be in [0, 1)")
        if self.dropout and "kv_up" in self.targets:
            raise ConfigError(
                f"lora dropout={self.dropout} with target 'kv_up': latent attention may multiply "
                "its weight with others before an input; leave one of them out"
            )
        require_within(lora_rank=self.rank)
        for name in self.targets:
            if name not in PROJECTIONS:
                raise ConfigError(
                    f"lora target {name!r} is no projection{nearest(name, PROJECTIONS)}"
                )
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f"lora targets={'+'.join(self.targets)!r}: name each projection once, and at least "
                f"one of {', '.join(PROJECTIONS)}"
            )

    @property
    def scale(self) -> float:
        """Factor s on the product B A of an adapter's matrices."""
        if self.scaling is AdapterScaling.RSLORA:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank
