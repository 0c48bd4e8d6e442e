"""Numeric policies of a run, by name; ``jaxinfra.numerics`` maps the names to dtypes."""

import enum

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


class PolicyName(enum.StrEnum):
    """Compute dtypes of a run; master weights, accumulation and reductions are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Numerics(enum.StrEnum):
    """Ways to order the sums of a forward pass."""

    FAST = "fast"  # as kernels and compilers choose by the shape of a batch
    # By a token's own text alone: an engine's log-probabilities equal a trainer's to the last bit.
    EXACT = "exact"


class WeightGradients(enum.StrEnum):
    """Dtypes of the weight gradient that a matmul returns; the sum inside is always fp32."""

    FP32 = "fp32"
    COMPUTE = "compute"  # rounded to the compute dtype: half the bytes in the gradient all-reduce


class Site(enum.StrEnum):
    """A kind of matmul that may have a recipe of its own."""

    PROJECTION = "projection"  # of attention and of dense feed-forward layers
    EXPERTS = "experts"  # of routed experts
    ROUTER = "router"  # scores by which tokens are sent to experts
    LOGITS = "logits"  # onto the vocabulary


class Fp8Scaling(enum.StrEnum):
    """Groups of elements that share a scale in a matmul of 8-bit operands."""

    BLOCKS = "blocks"  # 1x128 of activations and gradients, 128x128 of weights (DeepSeek-V3, 3.3)
    # 128x128 of all three, so a transposed operand has the same scales (Xi et al. 2024, Jetfire).
    SQUARES = "squares"


class Fp8Format(enum.StrEnum):
    """Formats of 8-bit floats: bits of exponent and of mantissa."""

    E4M3 = "e4m3"  # largest value 448
    E5M2 = "e5m2"  # largest value 57344


class Fp8Scales(enum.StrEnum):
    """Kinds of numbers that the scales of 8-bit operands may be."""

    FP32 = "fp32"
    POWER_OF_TWO = "power_of_two"  # dividing by them is exact


@record
class Fp8Matmuls:
    """Matmuls of 8-bit operands, forward and backward; their results are in the compute dtype."""

    scaling: Fp8Scaling = Fp8Scaling.BLOCKS  # groups of elements that share a scale
    scales: Fp8Scales = Fp8Scales.FP32  # values that a scale may have
    forward: Fp8Format = Fp8Format.E4M3  # format of activations and weights
    gradient: Fp8Format = Fp8Format.E4M3  # format of cotangents
    sites: tuple[Site, ...] = (Site.PROJECTION,)  # matmuls with 8-bit operands
    first_layers_out: int = 0  # first layers that stay in the compute dtype
    last_layers_out: int = 0  # last layers that stay in the compute dtype

    def __post_init__(self) -> None:
        if min(self.first_layers_out, self.last_layers_out) < 0:
            raise ConfigError(
                f"fp8 first_layers_out={self.first_layers_out}, last_layers_out="
                f"{self.last_layers_out}: both are numbers of layers; they must be at least 0"
            )
        refused = {
            Site.ROUTER: "a rounded score sends a token elsewhere",
            Site.LOGITS: "the loss multiplies with the vocabulary in a kernel of its own",
        }
        for site in self.sites:
            if site in refused:
                raise ConfigError(
                    f"fp8 sites={[each.value for each in self.sites]}: {site.value} cannot be in 8 "
                    f"bits, {refused[site]}; leave it out, and it stays in the policy's format"
                )
        if Site.EXPERTS in self.sites and self.scaling is not Fp8Scaling.BLOCKS:
            raise ConfigError(
                f"fp8 sites={[each.value for each in self.sites]} with scaling={self.scaling}: "
                "groups of an expert's tokens begin anywhere, so that only scales of 1x128 blocks "
                "are a token's own; choose scaling=blocks, or leave experts out"
            )
        if not self.sites:
            raise ConfigError("fp8 sites=[] names no matmul; set precision.fp8=none instead")


class StoredWeights(enum.StrEnum):
    """Storage formats of trained weights between steps."""

    FP32 = "fp32"  # a master copy, cast where it is used
    BF16 = "bf16"  # no master copy: updates are rounded stochastically


class LossScaling(enum.StrEnum):
    """Ways to keep small fp16 gradients from underflowing (Micikevicius et al. 2018)."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"


@record
class PrecisionConfig:
    """The numeric policy, matmuls in 8 bits and loss scaling.

    Raises:
        ConfigError: formats that do not go together.

    Examples:
        >>> precision = jaxinfra.PrecisionConfig(policy="bf16")
        >>> config = dataclasses.replace(jaxinfra.preset("tiny"), precision=precision)
    """

    policy: PolicyName = PolicyName.FP32  # compute dtype
    numerics: Numerics = Numerics.FAST  # order of sums in the forward pass
    weights: StoredWeights = StoredWeights.FP32  # storage format between steps
    fp8: Fp8Matmuls | None = None  # None: every matmul is in the compute dtype
    weight_gradients: WeightGradients = WeightGradients.FP32  # dtype of a matmul's weight gradient
    loss_scaling: LossScaling = LossScaling.NONE  # loss scaling for fp16 gradients
    initial_loss_scale: float = 2.0**15  # loss scale of the first step
    growth_interval: int = 2000  # finite steps in a row before the dynamic scale doubles

    def __post_init__(self) -> None:
        if self.policy == PolicyName.FP16 and self.loss_scaling == LossScaling.NONE:
            raise ConfigError(
                "policy=fp16 with loss_scaling=none loses gradients under 6e-8; "
                "choose loss_scaling=dynamic or static, or policy=bf16"
            )
        if self.weights == StoredWeights.BF16 and self.policy != PolicyName.BF16:
            raise ConfigError(
                f"weights=bf16 with policy={self.policy.value}: weights without a master copy are "
                "those that matmuls read; choose policy=bf16"
            )
        if self.fp8 is not None and self.numerics == Numerics.EXACT:
            raise ConfigError(
                "numerics=exact with fp8: the scales of 8-bit operands depend on the tokens beside "
                "a token; set fp8=none, or numerics=fast"
            )
        if self.fp8 is not None and self.policy == PolicyName.FP16:
            raise ConfigError(
                "fp8 with policy=fp16: products of 8-bit numbers to 57344 overflow fp16; choose "
                "policy=bf16"
            )
        if self.initial_loss_scale < 1.0 or self.growth_interval < 1:
            raise ConfigError(
                f"initial_loss_scale={self.initial_loss_scale} and growth_interval="
                f"{self.growth_interval} must be at least 1"
            )
