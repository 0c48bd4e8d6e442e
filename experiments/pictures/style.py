"""Pictures of the documentation, as vectors and as PNG; their look is the product's."""

from pathlib import Path

from matplotlib.figure import Figure


def save(figure: Figure, file: Path) -> None:
    """Writes the picture beside itself as SVG and as PNG."""
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(file.with_suffix(".png"), dpi=160)
