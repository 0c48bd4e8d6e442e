"""What a run watches for, and how often; none of it changes what a healthy run computes."""

import dataclasses

from jaxinfra.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReliabilityConfig:
    """Bounds and intervals of the guards; None turns one off."""

    hang_s: float = 600.0  # the longest that a phase of a step may last before the run is aborted
    heartbeat_s: float = 10.0  # the longest that a process may give no sign of life
    hash_every: int | None = 100  # steps between comparisons of replicated state across replicas
    probe_every: int | None = 50  # steps between timings of each rank's own devices
    spike_factor: float | None = None  # a loss this many times the recent median is a bad batch
    spike_window: int = 16  # finite losses before a spike can be told
    exclude_steps: tuple[int, ...] = ()  # steps whose batch is not trained on

    def __post_init__(self) -> None:
        for name in ("hang_s", "heartbeat_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"reliability.{name}={getattr(self, name)} must be positive")
        for name in ("hash_every", "probe_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"reliability.{name}={value} must be at least 1, or none")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise ConfigError(
                f"reliability.spike_factor={self.spike_factor} must exceed 1, or be none"
            )
        if self.spike_window < 2:
            raise ConfigError(f"reliability.spike_window={self.spike_window} must be at least 2")
        if any(step < 1 for step in self.exclude_steps):
            raise ConfigError(
                f"reliability.exclude_steps={list(self.exclude_steps)}: steps are counted from 1"
            )
