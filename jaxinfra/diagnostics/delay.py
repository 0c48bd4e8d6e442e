"""Records of a step's delays: each cause, the time won without it, and the remedy."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """One cause of delay in a training step, and the time per step that its removal saves."""

    cause: str
    ms: float  # per step
    text: str  # what was seen
    remedy: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A training step's time and its delays, the largest first."""

    step_ms: float
    delays: tuple[Delay, ...]

    def paragraph(self) -> str:
        """Returns the summary of a step's delays that ``jaxinfra trace`` prints first."""
        if not self.delays:
            return (
                f"A step takes {self.step_ms:.1f} ms, and nothing that could be avoided delays it."
            )
        won = [
            f"{each.ms:.1f} ms ({each.ms / self.step_ms:.0%}) to {each.cause}: {each.text}. "
            f"Remedy: {each.remedy}."
            for each in self.delays
        ]
        return f"A step takes {self.step_ms:.1f} ms. It loses " + " It loses ".join(won)

    def as_json(self) -> dict[str, Any]:
        """Returns the step's time and its delays as JSON values."""
        return {
            "step_ms": self.step_ms,
            "delays": [dataclasses.asdict(each) for each in self.delays],
        }
