"""Settings of the optimizer, its learning rate by step, and frozen parameters."""

import dataclasses
import enum
from typing import Any

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


class LearningRateSchedule(enum.StrEnum):
    """Shapes of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"  # warm-up, stable, decay (Hu et al. 2024)


class OptimizerKind(enum.StrEnum):
    """Update rules of the optimizer."""

    ADAMW = "adamw"  # two moments of each parameter (Loshchilov and Hutter 2019)
    LION = "lion"  # the sign of one moment (Chen et al. 2023): a third to a tenth of AdamW's rate
    # The second moment of a matrix, factored into a row and a column (Shazeer and Stern 2018). It
    # uses constants of its own, not beta1, beta2 and epsilon.
    ADAFACTOR = "adafactor"


@record
class MuonConfig:
    """Muon (Jordan et al. 2024) for hidden matrices; all other parameters use AdamW.

    Raises:
        ConfigError: a momentum outside [0, 1), or a rate that is not positive.

    Examples:
        >>> muon = jaxinfra.MuonConfig(momentum=0.9)
        >>> optimizer = jaxinfra.OptimizerConfig(learning_rate=1e-3, muon=muon)
    """

    momentum: float = 0.95  # Nesterov momentum
    # Learning rate of Muon's matrices over that of other parameters. At 1, Muon's updates have the
    # usual root mean square of AdamW's (Liu et al. 2025), so AdamW's rates and decays carry over.
    rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0 or self.rate <= 0.0:
            raise ConfigError(
                f"muon momentum={self.momentum} must be in [0, 1) and rate={self.rate} be positive"
            )


class MomentFormat(enum.StrEnum):
    """Storage formats of Adam's moments between steps."""

    FP32 = "fp32"
    BF16 = "bf16"  # rounded stochastically
    FP16 = "fp16"  # with a scale for each array
    FP8 = "fp8"  # e4m3 with a scale for each array, rounded stochastically


@record
class OptimizerConfig:
    """An optimizer: AdamW, another kind, or Muon beside AdamW; decay applies to matrices only.

    Raises:
        ConfigError: a setting out of range, or settings that do not go together.

    Examples:
        >>> optimizer = jaxinfra.OptimizerConfig(learning_rate=3e-4, warmup_steps=100, kind="lion")
        >>> optimizer.weight_decay
        0.1
    """

    learning_rate: float  # peak learning rate
    kind: OptimizerKind = OptimizerKind.ADAMW  # update rule
    schedule: LearningRateSchedule = LearningRateSchedule.COSINE  # learning rate after the warm-up
    warmup_steps: int = 0  # steps of linear warm-up
    decay_steps: int | None = None  # steps of WSD's decay phase; None: a fifth of the run
    final_fraction: float = 0.1  # final learning rate over the peak
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.1  # decay of matrices, times the learning rate
    clip_norm: float | None = 1.0  # largest global gradient norm; None: no clipping
    first_moment: MomentFormat = MomentFormat.FP32  # storage format between steps
    second_moment: MomentFormat = MomentFormat.FP32  # storage format between steps
    muon: MuonConfig | None = None  # None: AdamW for every parameter
    # Decay per step of a running mean of the weights (Polyak and Juditsky 1992). Evaluation,
    # generation and export then use the mean; None: they use the weights themselves.
    average: float | None = None
    # Your own in place of kind, muon, betas and decay: a part, (learning_rate schedule) ->
    # optax.GradientTransformation. Gradients are clipped by clip_norm before it.
    function: str | None = None
    # Your own in place of schedule and warmup_steps: a part, (step, *, steps, peak) -> rate.
    schedule_function: str | None = None
    # Your own, before clipping: a part, () -> optax.GradientTransformation.
    gradients: str | None = None
    frozen: tuple[str, ...] = ()  # patterns of parameters that stay as they begin: embedding/*

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.warmup_steps < 0:
            raise ConfigError(
                f"learning_rate={self.learning_rate} must be positive and "
                f"warmup_steps={self.warmup_steps} not negative"
            )
        if self.muon is not None and self.kind != OptimizerKind.ADAMW:
            raise ConfigError(
                f"muon beside kind={self.kind.value}: it takes the matrices, and adamw the rest; "
                "set optimizer.muon=none"
            )
        if self.average is not None and not 0.0 < self.average < 1.0:
            raise ConfigError(f"average={self.average} must be in (0, 1), or be none")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name}={getattr(self, name)} must be in [0, 1)")
        is_adamw = self.muon is None and self.kind == OptimizerKind.ADAMW
        if self.keeps_short_moments and not is_adamw:
            other = self.kind.value if self.muon is None else "muon"
            raise ConfigError(
                f"first_moment={self.first_moment.value} and second_moment="
                f"{self.second_moment.value} with {other}: only AdamW keeps moments in other "
                "formats than fp32; leave them, or use kind=adamw without muon"
            )
        if self.epsilon <= 0 or self.weight_decay < 0 or not 0 <= self.final_fraction <= 1:
            raise ConfigError(
                f"epsilon={self.epsilon} must be positive, weight_decay={self.weight_decay} not "
                f"negative, final_fraction={self.final_fraction} in [0, 1]"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm={self.clip_norm} must be positive, or none")
        if self.decay_steps is not None and self.decay_steps < 1:
            raise ConfigError(f"decay_steps={self.decay_steps} must be at least 1, or none")
        self._require_unset(self.function, UPDATE, "function")
        self._require_unset(self.schedule_function, RATE, "schedule_function")

    def _require_unset(self, own: str | None, others: dict[str, Any], what: str) -> None:
        """Raises ConfigError for a setting that a user's own function would not read."""
        given = [name for name, unset in others.items() if getattr(self, name) != unset]
        if own is not None and given:
            raise ConfigError(
                f"optimizer.{given[0]}={getattr(self, given[0])!s} with {what}={own}, which takes "
                f"its place; leave it at {others[given[0]]}, or set it in your own function"
            )

    @property
    def keeps_short_moments(self) -> bool:
        """Whether a moment is stored in fewer bits than fp32, in which it is computed."""
        return (self.first_moment, self.second_moment) != (MomentFormat.FP32,) * 2


def _unset(*names: str) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    return {name: defaults[name] for name in names}


UPDATE: dict[str, Any] = {
    **_unset("kind", "muon", "beta1", "beta2", "epsilon", "first_moment", "second_moment"),
    "weight_decay": 0.0,
}
"""Settings in whose place a user's own optimizer comes, each as it is then."""
RATE = _unset("schedule", "warmup_steps", "decay_steps", "final_fraction")
"""Settings in whose place a user's own schedule comes, each as it is then."""
