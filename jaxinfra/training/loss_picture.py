"""The loss picture of a run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_loss(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Training loss by step (and its moving average), held-out loss where it was measured.

    A step whose loss was not finite (None) is a gap.
    """
    # Here and not above: it takes a second, of every start of every process, for one's end.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = _curve(records, "loss")
    axes.plot(
        steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step"
    )
    axes.plot(steps, _moving_average(losses, 0.95), color="tab:blue", label="training, smoothed")
    heldout_steps, heldout_losses = _curve(records, "heldout_loss")
    if heldout_steps:
        axes.plot(heldout_steps, heldout_losses, "o-", color="tab:orange", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = file.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.rename(file)


def _curve(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [record for record in records if name in record]
    values = [math.nan if record[name] is None else record[name] for record in found]
    return [record["step"] for record in found], values


def _moving_average(values: Sequence[float], decay: float) -> list[float]:
    """Exponential, corrected for its start; a value that is not finite is passed over."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = decay * average + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        result.append(average / weight if weight else math.nan)
    return result
