"""A report of a run in one HTML file, with pictures of its loss and of its layers.

The page itself is a Jinja template, ``run_page.html``.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jaxinfra.diagnostics.run_view import RunView
from jaxinfra.runtime.picture_style import GREEN, RED, new_picture
from jaxinfra.training.summary import learning_curve, mixture_cells, smoothed

type _Places = Sequence[tuple[int, int]]
"""Block of every layer, and the layer's number among that block's repetitions."""


def draw_statistics(lines: Sequence[Mapping[str, Any]], places: _Places) -> Figure:
    """Plots residual stream, gradients and update-to-weight ratios over steps and layers.

    Args:
        lines: lines of ``statistics.jsonl``, one per step.
        places: block and repetition of each layer, as ``ModelConfig.layer_positions``.
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
    """Returns one step's activation statistics as table rows, one per layer and site."""
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
    """Plots the fullest expert's load over the mean, by step; None for a dense model."""
    names = [name for name in (records or [{}])[-1] if name.endswith("/imbalance")]
    if not names:
        return None
    figure, axes = _new_plot(2.4, "step (1: all experts have as many tokens)", "fullest over mean")
    for name in names:
        label = name.removeprefix("layers/").removesuffix("/imbalance")
        axes.plot(*_column(records, name), linewidth=0.9, label=label)
    axes.axhline(1.0, color=GREEN, linewidth=0.8)
    axes.legend(fontsize=8)
    return figure


def draw_curves(views: Sequence[RunView]) -> Figure:
    """Plots runs' training losses, or rewards, raw and smoothed, with held-out losses as points."""
    curves = [learning_curve(view.records) for view in views]
    labels = "; ".join(dict.fromkeys(label for _, label in curves))
    points = " (points: held-out)" if any(view.heldout for view in views) else ""
    figure, axes = _new_plot(3.6, "step", labels + points)
    for number, view in enumerate(views):
        color = f"C{number}"
        steps, losses = _column(view.records, curves[number][0])
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=color, label=view.path.name)
        if view.heldout:
            axes.plot(*zip(*view.heldout, strict=True), "o", color=color, markersize=4)
    axes.legend(fontsize=8)
    return figure


def _draw_times(view: RunView) -> Figure:
    figure, axes = _new_plot(2.4, "step (dotted: incidents)", "s per step")
    axes.plot(*_column(view.records, "step_s"), linewidth=0.8)
    for each in view.incidents:
        axes.axvline(each["step"], color=RED, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    return figure


def _draw_peaks(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    steps, sizes = _column(records, "peak_bytes")
    if not steps:
        return None
    figure, axes = _new_plot(2.0, "step", "GiB, most so far")
    axes.plot(steps, [size / 2**30 for size in sizes], linewidth=0.9)
    axes.set_ylim(bottom=0)
    return figure


def _new_plot(height: float, x_label: str, y_label: str) -> tuple[Figure, Any]:
    figure, axes = new_picture(9, height)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _column(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Returns steps that have a value of this name, and their values."""
    known = [each for each in records if each.get(name) is not None]
    return [each["step"] for each in known], [each[name] for each in known]


def run_page(view: RunView) -> str:
    """Returns the HTML report of a run.

    The page shows delays, loss curves, memory, wall time, ranks, incidents, experts, layers,
    environment and settings.
    """
    last, statistics = (view.records or [{}])[-1], view.layer_statistics
    figures = {
        "loss": draw_curves([view]) if view.records else None,
        "times": _draw_times(view) if view.records else None,
        "peaks": _draw_peaks(view.records),
        "balance": draw_balance(view.records),
        "statistics": draw_statistics(statistics, view.layer_positions) if statistics else None,
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"said": _said, "encoded": _encoded, "mixture_cells": mixture_cells}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text())
    return template.render(
        view=view,
        pictures={name: each and _encoded(_png(each)) for name, each in figures.items()},
        phases=sorted({name for each in view.ranks.values() for name in each}),
        layers=[name for name in last if name.startswith("layers/")],
        activations=statistics_rows(statistics[-1], view.layer_positions) if statistics else [],
    )


def _said(value: object) -> str:
    """A value of a record as people read it; null is a number that is not finite, or none."""
    if isinstance(value, dict):
        return ", ".join(f"{n}={v}" for n, v in value.items() if v != 1) or "one device"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
