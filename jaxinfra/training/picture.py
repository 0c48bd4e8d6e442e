"""The loss picture of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_loss(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Training loss by step (and its moving average), held-out loss where it was measured."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = [record["step"] for record in records if "loss" in record]
    losses = [record["loss"] for record in records if "loss" in record]
    axes.plot(
        steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step"
    )
    axes.plot(steps, _moving_average(losses, 0.95), color="tab:blue", label="training, smoothed")
    heldout = [(r["step"], r["heldout_loss"]) for r in records if "heldout_loss" in r]
    if heldout:
        axes.plot(*zip(*heldout, strict=True), "o-", color="tab:orange", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = file.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.rename(file)


def _moving_average(values: Sequence[float], decay: float) -> list[float]:
    """Exponential, corrected for its start; a non-finite value is passed over."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        if value == value and abs(value) != float("inf"):
            average = decay * average + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        result.append(average / weight if weight else float("nan"))
    return result
