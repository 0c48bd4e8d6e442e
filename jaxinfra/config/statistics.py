"""Which numbers of each layer a run records."""

import dataclasses

from jaxinfra.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsConfig:
    """Statistics of each layer's activations, gradients, weights and updates."""

    every: int | None = None  # steps between them; None: none, and the step's program has none

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"statistics.every={self.every} must be at least 1, or none")
