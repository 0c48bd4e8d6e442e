"""The picture of how evenly a run's tokens went to its experts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfra.runtime.picture_style import BLUE, GRAY, RED, new_picture

LOADS = "layers/expert_tokens"
_COUNTS = {"layers/dropped": "dropped by capacity", "layers/overflowed": "without room"}


def draw_loads(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Largest and least tokens of an expert by step, over the mean of a layer, and choices left
    out; nothing where the model has no experts.
    """
    rows = [record for record in records if f"{LOADS}/imbalance" in record]
    if not rows:
        return
    steps = [record["step"] for record in rows]
    figure, axes = new_picture(8, 4.5)
    axes.plot(
        steps,
        [record[f"{LOADS}/imbalance"] for record in rows],
        color=RED,
        label="most tokens of an expert / mean of its layer",
    )
    axes.plot(
        steps,
        [record[f"{LOADS}/least"] / max(record[f"{LOADS}/mean"], 1.0) for record in rows],
        color=BLUE,
        label="least tokens of an expert / mean",
    )
    axes.axhline(1.0, color=GRAY, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("load")
    counts = {name: text for name, text in _COUNTS.items() if name in rows[-1]}
    if counts:
        right = axes.twinx()
        right.set_ylabel("choices")
        for name, text in counts.items():
            right.plot(steps, [record[name] for record in rows], linestyle=":", label=text)
        right.legend(loc="upper left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    partial = file.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.rename(file)
