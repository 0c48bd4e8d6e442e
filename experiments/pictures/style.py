"""One look for pictures: colours that every eye tells apart, labels that fit, vector and PNG."""

from pathlib import Path

from matplotlib import rcsetup
from matplotlib.figure import Figure

# Okabe and Ito 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#999999")

LOOK = {
    "axes.prop_cycle": rcsetup.cycler(color=COLOURS),
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


def save(figure: Figure, file: Path) -> None:
    """Writes the picture beside itself as SVG and as PNG."""
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(file.with_suffix(".png"), dpi=160)
