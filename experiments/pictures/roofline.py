"""Draws docs/roofline.svg: kernels under the roofs that were measured.

    python -m experiments.pictures.roofline

``jaxinfra bench roofline`` draws the same picture beside its results.
"""

import json
import pathlib
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments/results/roofline-h200.json"
PICTURE = ROOT / "docs/roofline.svg"
ROOFS = {"fp8": "#999999", "bf16": "black", "tf32": "#999999", "fp32": "#999999"}
LABELS = {"fp32": "fp32, no tensor cores"}
GROUPS = {
    "ladder": ("#0072b2", "o", "ladder, 4096³"),
    "kernel": ("#009e73", "D", "our kernels"),
}
# Distance of a label from its point, so that labels of groups do not overlap.
OFFSETS = {"ladder": (-6, -3), "kernel": (6, -3)}
LEAST, MOST = 0.1, 1e5  # FLOPs per byte


def draw(document: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the picture of a results document as SVG."""
    with rc_context({"svg.hashsalt": "jaxinfra", "svg.fonttype": "none"}):
        figure(document).savefig(path, metadata={"Date": None})


def figure(document: dict[str, Any]) -> Figure:
    """Points are numbered by rate within their group; the list names them."""
    ceilings = dict(document["ceilings"])
    bandwidth = max(ceilings.pop("copy"), ceilings.pop("read", 0.0))
    points = [point for point in document["points"] if "failed" not in point]
    chart = Figure(figsize=(11, 6.4), layout="constrained")
    axes, names = chart.subplots(1, 2, width_ratios=(3.1, 1))
    for name, peak in ceilings.items():
        ridge = peak / bandwidth
        axes.plot(
            [LEAST, ridge, MOST], [LEAST * bandwidth / 1e12, peak / 1e12, peak / 1e12],
            color=ROOFS[name], linewidth=1.6 if name == "bf16" else 0.8,
        )  # fmt: skip
        axes.text(
            MOST, 1.04 * peak / 1e12, f"{LABELS.get(name, name)}: {peak / 1e12:,.0f} TFLOP/s",
            ha="right", va="bottom", fontsize=8,
        )  # fmt: skip
    left = 2.2 * LEAST
    axes.text(
        left, 0.5 * left * bandwidth / 1e12, f"memory: {bandwidth / 1e12:.2f} TB/s", fontsize=8
    )
    number, lines = 0, []
    for group, (color, marker, title) in GROUPS.items():
        members = sorted((p for p in points if p["group"] == group), key=lambda p: p["tflops"])
        if members:
            lines.append((title, color, "bold"))
        labels: list[tuple[dict[str, Any], list[int]]] = []
        for point in members:
            number += 1
            if labels and _close(labels[-1][0], point):
                labels[-1][1].append(number)
            else:
                labels.append((point, [number]))
            axes.plot(point["intensity"], point["tflops"], marker, color=color, markersize=6)
            share = f"{100 * point['of_attainable']:.0f}%"
            lines.append((f"{number}  {point['name']}  {share}", color, "normal"))
        for point, numbers in labels:
            axes.annotate(
                "-".join(str(end) for end in sorted({numbers[0], numbers[-1]})),
                (point["intensity"], point["tflops"]), fontsize=7, color=color,
                xytext=OFFSETS[group], textcoords="offset points",
                ha="left" if OFFSETS[group][0] > 0 else "right",
            )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlim=(LEAST, MOST),
        xlabel="FLOPs for each byte that must move through device memory",
        ylabel="TFLOP/s",
        title=f"{document['device']}: operations under its roofs",
    )  # fmt: skip
    axes.grid(which="major", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    names.axis("off")
    names.set(xlim=(0, 1), ylim=(max(len(lines), 1), -1))
    names.text(0, -0.6, "percent of what the roof allows", fontsize=8)
    for i, (text, color, weight) in enumerate(lines):
        names.text(0, i + 0.5, text, fontsize=8, color=color, fontweight=weight, va="center")
    return chart


def _close(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether their numbers would overlap."""
    return all(0.8 < second[key] / first[key] < 1.25 for key in ("intensity", "tflops"))


def main() -> None:
    """Draws the stored results."""
    draw(json.loads(RESULTS.read_text()), PICTURE)


if __name__ == "__main__":
    main()
