"""A report of a run in one HTML file, with pictures of its loss and of its layers."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jaxinfra.diagnostics.run_view import RunView
from jaxinfra.runtime.picture_style import GREEN, RED, new_picture
from jaxinfra.training.summary import loss_unit, mixture_cells, smoothed

type _Places = Sequence[tuple[int, int]]
"""Block of every layer, and the layer's number among that block's repetitions."""


def draw_statistics(lines: Sequence[Mapping[str, Any]], places: _Places) -> Figure:
    """Plots residual stream, gradients and update-to-weight ratios over steps and layers.

    Args:
        lines: lines of ``statistics.jsonl``, one per step.
        places: ``ModelConfig.layer_places``.
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


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-size:.9rem}td,th{padding:.2rem .8rem .2rem 0;text-align:left;
vertical-align:top;border-bottom:1px solid #eee}img{max-width:100%}p.first{background:#f4f6f8;
padding:.7rem 1rem;border-left:4px solid #4e79a7}details{margin-top:1rem}
"""


def run_page(view: RunView) -> str:
    """Returns the HTML report of a run.

    The page shows delays, loss curves, memory, wall time, ranks, incidents, experts, layers,
    environment and settings.
    """
    first = view.explanation.paragraph() if view.explanation else "No step is done yet."
    parts = [
        f"<h1>{html.escape(str(view.path))}</h1>",
        _table(list(view.headline()), [list(view.headline().values())]),
        f'<p class="first">{html.escape(first)}</p>',
    ]
    if view.records:
        parts += ["<h2>Loss</h2>", _image(draw_curves([view]), "training and held-out loss")]
        parts += ["<h2>Time per step</h2>", _image(_times(view), "seconds per step")]
    parts += _memory(view)
    if view.mixture:
        head, *rows = mixture_cells(view.mixture)
        parts += ["<h2>Sources</h2>", _table(head, rows)]
    if view.causes:
        whole = sum(view.causes.values())
        rows = [
            [cause, f"{seconds:.1f}", f"{seconds / whole:.1%}"]
            for cause, seconds in sorted(view.causes.items(), key=lambda item: -item[1])
        ]
        parts += ["<h2>Wall time</h2>", _table(["cause", "s", "share"], rows)]
    if any(view.ranks.values()):
        phases = sorted({name for each in view.ranks.values() for name in each})
        rows = [
            [str(rank), *(f"{each.get(name, 0.0):.1f}" for name in phases)]
            for rank, each in sorted(view.ranks.items())
        ]
        parts += [
            "<h2>What each rank's host does, ms per step</h2>",
            _table(["rank", *phases], rows),
        ]
    shown = [[str(each["step"]), each["kind"], each["text"]] for each in view.incidents]
    parts += ["<h2>Incidents</h2>", _table(["step", "kind", "what"], shown or [["-", "none", ""]])]
    parts += _spikes(view)
    parts += _layers(view)
    if view.environments:
        head = [name for name in view.environments[-1] if name != "step"]
        rows = [
            [str(each.get("step")), *(_said(each.get(name)) for name in head)]
            for each in view.environments
        ]
        parts += ["<h2>Environment, by session</h2>", _table(["after step", *head], rows)]
    settings = [[path, str(value)] for path, value in view.config.items()]
    parts.append(f"<details><summary>Settings</summary>{_table(['', ''], settings)}</details>")
    title = html.escape(view.path.name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _memory(view: RunView) -> list[str]:
    """Bytes over steps, and where those went that did not suffice."""
    parts = []
    known = [(e["step"], e["peak_bytes"]) for e in view.records if e.get("peak_bytes")]
    if known:
        parts.append(_image(_peaks(known), "most memory held, by step"))
    if view.out_of_memory is not None:
        parts.append("<p>A first step did not fit; this is where its memory would have gone:</p>")
        parts.append(_png(view.out_of_memory, "memory of a step that did not fit"))
    return ["<h2>Memory</h2>", *parts] if parts else []


def _spikes(view: RunView) -> list[str]:
    parts = []
    for report in view.spikes:
        rows = [
            [
                *(_said(e.get(name)) for name in ("sample", "source", "loss")),
                _said(e.get("text"))[:80],
            ]
            for e in report["samples"][:5]
        ]
        parts += [
            f"<p>Step {report['step']}: {html.escape(report['text'])}; "
            f"{html.escape(report['done'])}.</p>",
            _table(["sample", "source", "loss", "begins"], rows),
        ]
    return ["<h2>Loss spikes</h2>", *parts] if parts else []


def _layers(view: RunView) -> list[str]:
    """Sections on layers: balance of experts, values that layers emit, and statistics."""
    parts = []
    balance = draw_balance(view.records)
    if balance is not None:
        parts += ["<h2>Balance of experts</h2>", _image(balance, "fullest expert over the mean")]
    names = [name for name in (view.records or [{}])[-1] if name.startswith("layers/")]
    if names:
        rows = [[name, _said(view.records[-1][name])] for name in names]
        parts += ["<h2>Layers, last step</h2>", _table(["what", "value"], rows)]
    if view.layer_statistics:
        last = view.layer_statistics[-1]
        head = ["layer", "site", "rms", "largest", "zeros", "not finite"]
        table = _table(head, statistics_rows(last, view.places))
        parts += [
            "<h2>Statistics of layers</h2>",
            _image(draw_statistics(view.layer_statistics, view.places), "by step and layer"),
            f"<details><summary>Activations of step {last['step']}</summary>{table}</details>",
        ]
    return parts


def _said(value: object) -> str:
    """A value of a record as people read it; null is a number that is not finite, or none."""
    if isinstance(value, dict):
        return ", ".join(f"{n}={v}" for n, v in value.items() if v != 1) or "one device"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _peaks(known: Sequence[tuple[int, float]]) -> Figure:
    figure, axes = new_picture(9, 2.0)
    steps, sizes = zip(*known, strict=True)
    axes.plot(steps, [size / 2**30 for size in sizes], linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("GiB, most so far")
    axes.grid(alpha=0.3)
    return figure


def draw_curves(views: Sequence[RunView]) -> Figure:
    """Plots runs' training losses, raw and smoothed, with held-out losses as points."""
    figure, axes = new_picture(9, 3.6)
    for number, view in enumerate(views):
        color = f"C{number}"
        steps = [each["step"] for each in view.records if each["loss"] is not None]
        losses = [each["loss"] for each in view.records if each["loss"] is not None]
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=color, label=view.path.name)
        if view.heldout:
            axes.plot(*zip(*view.heldout, strict=True), "o", color=color, markersize=4)
    axes.set_xlabel("step")
    units = dict.fromkeys(loss_unit(view.records) for view in views)
    axes.set_ylabel(f"loss, {' and '.join(units)} (points: held-out)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _times(view: RunView) -> Figure:
    figure, axes = new_picture(9, 2.4)
    known = [(each["step"], each["step_s"]) for each in view.records if each.get("step_s")]
    if known:
        axes.plot(*zip(*known, strict=True), linewidth=0.8)
    for each in view.incidents:
        axes.axvline(each["step"], color=RED, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step (dotted: incidents)")
    axes.set_ylabel("s per step")
    axes.grid(alpha=0.3)
    return figure


def _image(figure: Figure, text: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return _png(data.getvalue(), text)


def _png(data: bytes, text: str) -> str:
    inside = base64.b64encode(data).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{inside}">'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Iterable[str], kind: str) -> str:
        inside = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
