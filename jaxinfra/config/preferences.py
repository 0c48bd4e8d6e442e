"""Settings of training on preference pairs (a better and a worse answer): loss and strength."""

import dataclasses
import enum
import math

from jaxinfra.errors import ConfigError


class PreferenceLoss(enum.StrEnum):
    """Losses of the log probabilities of two answers.

    Examples:
        >>> [str(each) for each in jaxinfra.PreferenceLoss]
        ['dpo', 'ipo', 'simpo', 'orpo', 'cpo']
    """

    DPO = "dpo"  # Rafailov et al. 2023, equation 7
    IPO = "ipo"  # Azar et al. 2023, equation 17; beta is its tau
    SIMPO = "simpo"  # Meng et al. 2024, equation 6
    ORPO = "orpo"  # Hong et al. 2024, equations 6 and 7; beta is its lambda
    CPO = "cpo"  # Xu et al. 2024, equation 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceConfig:
    """A loss on pairs of answers. dpo and ipo use the run's start model as reference.

    Raises:
        ConfigError: a number is out of range, or the loss has no such coefficient.

    Examples:
        >>> preferences = jaxinfra.PreferenceConfig(loss="simpo")
        >>> preferences.strength, preferences.target_margin
        (2.0, 1.0)
    """

    loss: PreferenceLoss = PreferenceLoss.DPO  # dpo, ipo; without reference model: simpo, orpo, cpo
    beta: float | None = None  # strength; None: 2 for simpo, 0.1 for the others
    margin: float | None = None  # gamma of simpo; None: half of beta
    label_smoothing: float = 0.0  # assumed fraction of swapped pairs; for dpo, cpo and simpo
    # Weight of the better answer's mean nll per token, which is added to the loss; None: 1 for orpo
    # and cpo, 0 for the others.
    likelihood: float | None = None

    def __post_init__(self) -> None:
        for name in ("beta", "likelihood", "margin"):
            value = getattr(self, name)
            if value is not None and not (0.0 <= value < math.inf):
                raise ConfigError(f"preferences {name}={value} must be 0 or more, and finite")
        if self.beta == 0.0:
            raise ConfigError("preferences beta=0.0: both answers would weigh nothing; give more")
        if self.margin is not None and self.loss != PreferenceLoss.SIMPO:
            raise ConfigError(
                f"preferences margin={self.margin} with loss={self.loss}: only simpo has one"
            )
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"preferences label_smoothing={self.label_smoothing} must be at least 0 and below "
                "0.5, where a pair says nothing"
            )
        if self.label_smoothing and self.loss in (PreferenceLoss.IPO, PreferenceLoss.ORPO):
            raise ConfigError(
                f"preferences label_smoothing={self.label_smoothing} with loss={self.loss}: "
                "it is defined for dpo, cpo and simpo"
            )

    @property
    def strength(self) -> float:
        """Beta of the preference loss: the given value, or the loss's default."""
        if self.beta is not None:
            return self.beta
        return 2.0 if self.loss == PreferenceLoss.SIMPO else 0.1

    @property
    def target_margin(self) -> float:
        """Gamma (target margin) of simpo: the given value, or half of beta; 0 for other losses."""
        if self.loss != PreferenceLoss.SIMPO:
            return 0.0
        return self.strength / 2 if self.margin is None else self.margin

    @property
    def likelihood_weight(self) -> float:
        """Weight of the better answer's mean negative log likelihood."""
        if self.likelihood is not None:
            return self.likelihood
        return 1.0 if self.loss in (PreferenceLoss.ORPO, PreferenceLoss.CPO) else 0.0

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs log probabilities of the run's start model."""
        return self.loss in (PreferenceLoss.DPO, PreferenceLoss.IPO)
