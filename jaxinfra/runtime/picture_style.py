"""The style of all pictures: few lines, and colors that color-blind readers tell apart."""

from pathlib import Path
from typing import Any

# Okabe and Ito 2008.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#999999")
BLUE, RED, GREEN, ORANGE, SKY, PINK, GRAY = COLORS

LOOK = {
    "axes.prop_cycle": f"cycler('color', {list(COLORS)})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jaxinfra",  # the same file each time
}
"""Settings of matplotlib."""


def new_picture(width: float, height: float, *, rows: int = 1) -> tuple[Any, Any]:
    """Makes a figure of this size in inches, and its axes; an array of several rows."""
    # Here and not above: it takes a second, of every start of every process, for one's end.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows)


def save_picture(figure: Any, file: Path) -> None:
    """Writes a figure to a file, which is replaced at once: a reader never sees half of it."""
    partial = file.with_name(f"{file.stem}.partial{file.suffix}")
    figure.savefig(partial, dpi=120)
    partial.rename(file)
