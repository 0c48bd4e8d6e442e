"""The loss picture of a run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.runtime.picture_style import BLUE, RED, new_picture
from jaxinfra.training.loads_picture import draw_loads


def draw_run(records: Sequence[dict[str, Any]], run: RunDirectory) -> None:
    """The pictures that a run directory has: losses, and how evenly tokens went to experts."""
    draw_loss(records, run.picture_file)
    draw_loads(records, run.loads_picture_file)


def draw_loss(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Training loss by step (and its mean over steps around), held-out loss where it was measured.

    A step whose loss was not finite (None) is a gap.
    """
    figure, axes = new_picture(8, 4.5)
    steps, losses = _curve(records, "loss")
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, smoothed(losses), color=BLUE, label="training, smoothed")
    heldout_steps, heldout_losses = _curve(records, "heldout_loss")
    if heldout_steps:
        axes.plot(heldout_steps, heldout_losses, "o-", color=RED, label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, {loss_unit(records)}")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = file.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.rename(file)


def loss_unit(records: Sequence[dict[str, Any]]) -> str:
    """What a run's loss is of: of pairs of answers it is their own loss, one for each pair."""
    of_pairs = any(name.startswith("preferences/") for record in records for name in record)
    return "per pair" if of_pairs else "nats per token"


def _curve(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [record for record in records if name in record]
    values = [math.nan if record[name] is None else record[name] for record in found]
    return [record["step"] for record in found], values


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over a window centred on each step, so that the curve does not lag behind the loss.

    The window is a fiftieth of the run, shorter at the ends; what is not finite is passed over.
    """
    half = len(values) // 100
    result = []
    for place in range(len(values)):
        reach = min(half, place, len(values) - 1 - place)
        near = [x for x in values[place - reach : place + reach + 1] if math.isfinite(x)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result
