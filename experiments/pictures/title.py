"""The README's picture: a training step beside plain JAX, by what its milliseconds go to.

    python -m experiments.pictures.title

Plotted from experiments/results/step-h200.json: Llama-3.2-1B shapes, batch 4 x 4096, one H200.
"""

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from experiments.pictures.style import save
from jaxinfra.runtime.picture_style import COLORS, LOOK

ROOT = Path(__file__).parents[2]
KINDS = ("matmul", "attention", "elementwise", "reduction", "copy", "idle")


def main() -> None:
    """Draws docs/title.svg and docs/title.png."""
    found = json.loads((ROOT / "experiments" / "results" / "step-h200.json").read_text())
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(9, 2.9), layout="constrained")
        axes = figure.subplots()
        for row, side in enumerate(("plain", "ours")):
            trace = found["traces"][side]
            left = 0.0
            for kind, colour in zip(KINDS, COLORS, strict=False):
                ms = trace["by_kind_ms"][kind]
                label = kind if row == 0 else None
                axes.barh(row, ms, left=left, color=colour, label=label, height=0.6)
                if ms > 12:
                    place = (left + ms / 2, row)
                    axes.text(*place, f"{ms:.0f}", ha="center", va="center", color="white")
                left += ms
            axes.text(left + 3, row, f"{left:.0f} ms", va="center", fontweight="bold")
        axes.set_yticks((0, 1), ("plain JAX", "jaxinfra"))
        axes.invert_yaxis()
        axes.set_xlim(0, 325)
        axes.set_xlabel("milliseconds of one training step, Llama-3.2-1B shapes, 4 x 4096 tokens")
        axes.set_title("One H200: where a step's time goes")
        figure.legend(loc="outside lower center", ncols=len(KINDS))
        save(figure, ROOT / "docs" / "title")


if __name__ == "__main__":
    main()
