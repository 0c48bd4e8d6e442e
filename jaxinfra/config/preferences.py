"""Settings of training on preferences (which answers are better): loss and strength."""

import enum
import math

from jaxinfra.config.data import DataFormat
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError


class PreferenceLoss(enum.StrEnum):
    """Losses of the log probabilities or scores of two answers, or of single ones (kto).

    Examples:
        >>> [str(each) for each in jaxinfra.PreferenceLoss]
        ['dpo', 'ipo', 'simpo', 'orpo', 'cpo', 'kto', 'reward']
    """

    DPO = "dpo"  # Rafailov et al. 2023, equation 7
    IPO = "ipo"  # Azar et al. 2023, equation 17; beta is its tau
    SIMPO = "simpo"  # Meng et al. 2024, equation 6
    ORPO = "orpo"  # Hong et al. 2024, equations 6 and 7; beta is its lambda
    CPO = "cpo"  # Xu et al. 2024, equation 6
    KTO = "kto"  # single answers, good or bad; Ethayarajh et al. 2024, equation 8
    REWARD = "reward"  # a reward model (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)


@record
class PreferenceConfig:
    """A loss on answers. dpo, ipo and kto use the run's start model as reference.

    Raises:
        ConfigError: a number is out of range, or the loss has no such coefficient.

    Examples:
        >>> preferences = jaxinfra.PreferenceConfig(loss="simpo")
        >>> preferences.strength, preferences.target_margin
        (2.0, 1.0)
    """

    # dpo, ipo; without reference model simpo, orpo, cpo; of single answers kto; a model's: reward
    loss: PreferenceLoss = PreferenceLoss.DPO
    beta: float | None = None  # strength; None: 2 for simpo, 0.1 for the others; reward has none
    margin: float | None = None  # gamma of simpo; None: half of beta
    label_smoothing: float = 0.0  # assumed fraction of swapped pairs; dpo, cpo, simpo and reward
    # Weight of the better answer's mean nll per token, which is added to the loss; None: 1 for orpo
    # and cpo, 0 for the others.
    likelihood: float | None = None
    desirable_weight: float = 1.0  # weight of good answers, for kto
    undesirable_weight: float = 1.0  # weight of bad answers, for kto

    def __post_init__(self) -> None:
        for name in ("beta", "likelihood", "margin", "desirable_weight", "undesirable_weight"):
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
        unsmoothed = (PreferenceLoss.IPO, PreferenceLoss.ORPO, PreferenceLoss.KTO)
        if self.label_smoothing and self.loss in unsmoothed:
            raise ConfigError(
                f"preferences label_smoothing={self.label_smoothing} with loss={self.loss}: "
                "it is defined for dpo, cpo, simpo and reward"
            )
        if self.loss == PreferenceLoss.REWARD and (self.beta or self.likelihood):
            raise ConfigError(
                f"preferences beta={self.beta}, likelihood={self.likelihood} with loss=reward: "
                "scores have no scale and no likelihood; leave both out"
            )
        weights = self.desirable_weight, self.undesirable_weight
        if self.loss == PreferenceLoss.KTO:
            if self.likelihood or 0.0 in weights:
                raise ConfigError(
                    f"preferences likelihood={self.likelihood}, desirable_weight={weights[0]}, "
                    f"undesirable_weight={weights[1]}: kto has weights of its answers, both above "
                    "0, and no likelihood"
                )
        elif weights != (1.0, 1.0):
            raise ConfigError(
                f"preferences desirable_weight={weights[0]}, undesirable_weight={weights[1]} with "
                f"loss={self.loss}: only kto has them"
            )

    @property
    def strength(self) -> float:
        """Beta of the preference loss: the given value, or the loss's default."""
        if self.beta is not None:
            return self.beta
        return {PreferenceLoss.SIMPO: 2.0, PreferenceLoss.REWARD: 1.0}.get(self.loss, 0.1)

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
        return self.loss in (PreferenceLoss.DPO, PreferenceLoss.IPO, PreferenceLoss.KTO)

    @property
    def data_format(self) -> DataFormat:
        """Format of the rows that the loss is of."""
        found = {PreferenceLoss.KTO: DataFormat.LABELLED, PreferenceLoss.REWARD: DataFormat.SCORED}
        return found.get(self.loss, DataFormat.PREFERENCES)
