"""Pictures of what a run recorded of each of its layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jaxinfra.runtime.picture_style import GREEN, new_picture

type _Places = Sequence[tuple[int, int]]
"""Of every layer its block, and which of that block's repetitions it is."""


def draw_statistics(lines: Sequence[Mapping[str, Any]], places: _Places) -> Figure:
    """Over steps and layers: the residual stream, gradients, and updates against weights.

    Args:
        lines: of ``statistics.jsonl``, one for each step.
        places: of ``ModelConfig.layer_places``.
    """
    panels = {
        "residual stream, rms": [_of_stream(line, places) for line in lines],
        "gradients, rms (mean over arrays)": [
            _of_arrays(line, places, "gradient_rms") for line in lines
        ],
        "updates over weights (mean over arrays)": [
            _of_arrays(line, places, "update_ratio") for line in lines
        ],
    }
    figure, rows = new_picture(9, 2.1 * len(panels), rows=len(panels))
    steps = [line["step"] for line in lines]
    for axes, (title, columns) in zip(rows, panels.items(), strict=True):
        values_LS = np.array(columns, np.float64).T
        shown = values_LS[np.isfinite(values_LS) & (values_LS > 0)]
        if not shown.size:
            continue
        low, high = shown.min(), max(shown.max(), shown.min() * 1.01)
        image = axes.imshow(
            np.where(values_LS > 0, values_LS, np.nan),
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            norm=LogNorm(low, high),
        )
        every = max(1, len(steps) // 10)
        axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]])
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("layer")
        axes.set_title(title, fontsize=9, loc="left")
        figure.colorbar(image, ax=axes)
    axes.set_xlabel("step")
    return figure


def statistics_rows(line: Mapping[str, Any], places: _Places) -> list[list[str]]:
    """A table of one step: each layer's activations by site."""
    rows = []
    for layer, (block, repetition) in enumerate(places):
        for path, values in line["activations"].items():
            site = path.removeprefix(f"blocks/{block}/")
            if site == path:
                continue
            each = [values[name][repetition] for name in ("rms", "largest", "zeros", "nonfinite")]
            shown = ["not finite" if value is None else f"{value:.3g}" for value in each]
            rows.append([str(layer), site, *shown])
    return rows


def _of_stream(line: Mapping[str, Any], places: _Places) -> list[float]:
    known = line["activations"]
    return [
        _number(known[f"blocks/{block}/stream"]["rms"][repetition]) for block, repetition in places
    ]


def _of_arrays(line: Mapping[str, Any], places: _Places, name: str) -> list[float]:
    """The mean over a layer's arrays."""
    found = []
    for block, repetition in places:
        each = [
            _number(values[name][repetition])
            for path, values in line["parameters"].items()
            if path.startswith(f"blocks/{block}/")
        ]
        found.append(float(np.mean(each)) if each else np.nan)
    return found


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def draw_balance(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    """The fullest expert over the mean one, by step; None where no layer has experts."""
    names = [name for name in (records or [{}])[-1] if name.endswith("/imbalance")]
    if not names:
        return None
    figure, axes = new_picture(9, 2.4)
    for name in names:
        known = [(each["step"], each[name]) for each in records if each.get(name) is not None]
        label = name.removeprefix("layers/").removesuffix("/imbalance")
        axes.plot(*zip(*known, strict=True), linewidth=0.9, label=label)
    axes.axhline(1.0, color=GREEN, linewidth=0.8)
    axes.set_xlabel("step (1: all experts have as many tokens)")
    axes.set_ylabel("fullest over mean")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
