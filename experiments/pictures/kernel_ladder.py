"""Draws docs/kernel-ladder.svg and docs/kernel-effects.svg from the stored measurements.

python -m experiments.pictures.kernel_ladder
"""

import json
import pathlib
import statistics
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.ladder import RUNGS

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments/results/ladder-h200.json"
DOCS = ROOT / "docs"
THREADS, TENSOR_CORES, XLA = "#99c7e0", "#0072b2", "#e69f00"
FIRST_WITH_TENSOR_CORES = "tensor_core"


def rungs(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rungs by name, each at the largest size it was measured at."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["name"].startswith("rung ") and "failed" not in row:
            name = row["name"].split()[1]
            if name not in found or row["size"] > found[name]["size"]:
                found[name] = row
    return {rung.name: found[rung.name] for rung in RUNGS if rung.name in found}


def ladder_figure(document: dict[str, Any]) -> Figure:
    """A bar a rung, logarithmic, and cuBLAS as the ceiling."""
    found = rungs(document["rows"])
    ceiling = statistics.median(row["xla_tflops"] for row in found.values() if row["size"] == 8192)
    chart = Figure(figsize=(9, 5), layout="constrained")
    axes = chart.subplots()
    names = list(found)
    first = names.index(FIRST_WITH_TENSOR_CORES)
    colors = [THREADS] * first + [TENSOR_CORES] * (len(names) - first)
    axes.barh(range(len(names)), [row["tflops"] for row in found.values()], color=colors)
    for i, row in enumerate(found.values()):
        text = f" {row['tflops']:,.0f}" if row["tflops"] >= 10 else f" {row['tflops']:.2g}"
        text += f", {row['of_xla']:.1%} of cuBLAS"
        inside = row["tflops"] > 20
        axes.text(
            row["tflops"], i, text + " " if inside else text, va="center", fontsize=9,
            ha="right" if inside else "left", color="white" if i >= first else "black",
        )  # fmt: skip
    axes.axvline(ceiling, color=XLA, linewidth=1.5)
    axes.text(
        ceiling, -0.75, f"cuBLAS: {ceiling:,.0f} ", ha="right", va="center", color=XLA, fontsize=9
    )
    labels = [
        f"{i + 1}  {name.replace('_', ' ')}" + (", 4096³" if found[name]["size"] == 4096 else "")
        for i, name in enumerate(names)
    ]
    axes.set_yticks(range(len(names)), labels)
    axes.set(xscale="log", xlabel="TFLOP/s, bf16, 8192³ where not said")
    axes.set_ylim(len(names) - 0.4, -1.1)
    axes.set_title(f"The kernel ladder on one {document['device']}")
    axes.spines[["top", "right"]].set_visible(False)
    return chart


def effects_figure(document: dict[str, Any]) -> Figure:
    """Stride, occupancy, divergence, ELU: one panel each."""
    rows = {row["name"]: row for row in document["rows"]}
    chart = Figure(figsize=(11, 7), layout="constrained")
    panels = chart.subplots(2, 2)
    _strides(panels[0, 0], rows["access"])
    _occupancy(panels[0, 1], rows["occupancy"])
    _divergence(panels[1, 0], rows["divergence"])
    _elu(panels[1, 1], rows["elu"])
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return chart


def _strides(axes, row: dict[str, Any]) -> None:
    strides = [each["stride"] for each in row["stride"]]
    rates = [each["gb_s"] for each in row["stride"]]
    axes.plot(strides, rates, "o-", color=TENSOR_CORES, label="measured")
    # 64 bytes move for each number of 4, until numbers share none; 4 more are written.
    moved = [4 * min(stride, 16) + 4 for stride in strides]
    axes.plot(
        strides, [rates[0] * 8 / each for each in moved], "--", color="gray",
        label="if 64 bytes move at a time",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(strides, [str(stride) for stride in strides])
    axes.set(xlabel="numbers between neighbouring threads", ylabel="GB/s asked for", ylim=(0, None))
    axes.set_title("Coalescing: x[::stride], fp32")
    axes.legend(frameon=False)


def _occupancy(axes, row: dict[str, Any]) -> None:
    for in_flight, color in ((1, THREADS), (4, TENSOR_CORES)):
        chosen = [each for each in row["rows"] if each["in_flight"] == in_flight]
        axes.plot(
            [each["warps"] for each in chosen], [each["gb_s"] for each in chosen], "o-",
            color=color, label=f"{in_flight} load{'s' * (in_flight > 1)} of 16 bytes per thread",
        )  # fmt: skip
    warps = sorted({each["warps"] for each in row["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(warps, [str(each) for each in warps])
    axes.set(xlabel="warps on a multiprocessor", ylabel="GB/s copied", ylim=(0, None))
    axes.set_title("Occupancy: bytes in flight hide latency")
    axes.legend(frameon=False)


def _divergence(axes, row: dict[str, Any]) -> None:
    names = list(row["ms"])
    first = row["ms"][names[0]]
    axes.bar(names, [row["ms"][name] / first for name in names], color=[THREADS, TENSOR_CORES])
    for i, name in enumerate(names):
        predicted = row["longest_over_mean"][name] / row["longest_over_mean"][names[0]]
        axes.plot([i - 0.4, i + 0.4], [predicted] * 2, "--", color="gray")
        axes.text(i, row["ms"][name] / first / 2, f"{row['ms'][name]:.2f} ms", ha="center")
    axes.set(ylabel="time, relative")
    axes.set_title("Divergence: the same loops in two orders\n(dashed: a warp's longest loop)")


def _elu(axes, row: dict[str, Any]) -> None:
    found = row["rows"]
    names = [name for name in found if name != "copy"]
    axes.barh(names, [found[name]["gb_s"] for name in names], color=TENSOR_CORES)
    for i, name in enumerate(names):
        axes.text(
            found[name]["gb_s"], i, f"{found[name]['gb_s']:,.0f} ", va="center", ha="right",
            color="white", fontsize=8,
        )  # fmt: skip
    axes.axvline(found["copy"]["gb_s"], color=XLA, linewidth=1.5)
    axes.text(found["copy"]["gb_s"], 2, " XLA's copy", va="center", color=XLA, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set(xlabel="GB/s of the fewest bytes")
    axes.set_title("ELU, bf16")


def main() -> None:
    """Writes the pictures."""
    document = json.loads(RESULTS.read_text())
    with rc_context({"svg.hashsalt": "jaxinfra", "svg.fonttype": "none"}):
        for name, draw in (("kernel-ladder", ladder_figure), ("kernel-effects", effects_figure)):
            draw(document).savefig(DOCS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
