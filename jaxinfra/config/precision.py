"""Which numeric policy a run uses. Names only: ``jaxinfra.numerics`` gives them their dtypes."""

import dataclasses
import enum

from jaxinfra.core.errors import ConfigError


class PolicyName(enum.StrEnum):
    """Compute dtype of a run; master weights, accumulation and reductions are fp32 in all three."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class WeightGradients(enum.StrEnum):
    """What a matmul hands on of a weight's gradient, which it sums in fp32 either way."""

    FP32 = "fp32"
    COMPUTE = "compute"  # rounded to the compute dtype: half the bytes of its sum over devices


class LossScaling(enum.StrEnum):
    """How small fp16 gradients are kept from underflowing (Micikevicius et al. 2018)."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Policy and loss scaling."""

    policy: PolicyName = PolicyName.FP32  # compute dtype
    weight_gradients: WeightGradients = WeightGradients.FP32  # in which dtype they are summed
    loss_scaling: LossScaling = LossScaling.NONE  # of fp16 gradients
    initial_loss_scale: float = 2.0**15  # where scaling begins
    growth_interval: int = 2000  # finite steps in a row before the dynamic scale doubles

    def __post_init__(self) -> None:
        if self.policy is PolicyName.FP16 and self.loss_scaling is LossScaling.NONE:
            raise ConfigError(
                "policy=fp16 with loss_scaling=none loses gradients under 6e-8; "
                "choose loss_scaling=dynamic or static, or policy=bf16"
            )
        if self.initial_loss_scale < 1.0 or self.growth_interval < 1:
            raise ConfigError(
                f"initial_loss_scale={self.initial_loss_scale} and growth_interval="
                f"{self.growth_interval} must be at least 1"
            )
