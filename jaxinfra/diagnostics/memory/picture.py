"""A picture of a compiled program's memory over its instructions."""

from pathlib import Path

import numpy as np

from jaxinfra.diagnostics.memory.report import ROLES, MemoryReport, gib
from jaxinfra.runtime.picture_style import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    new_picture,
)

OUT_OF_MEMORY_PICTURE = "out-of-memory.png"  # in the directory of a run that did not fit

_COLORS = dict(
    zip(
        ROLES,
        (BLUE, "#99C7E0", RED, GREEN, "#99D8C7", ORANGE, PINK, "#EBC9DC", "#555555", SKY, GRAY,
         "#EEEEEE"),
        strict=True,
    )
)  # fmt: skip


def draw_memory(report: MemoryReport, file: Path, *, limit_bytes: int | None = None) -> None:
    """Plots a program's memory by role over its instructions, and explains its peak.

    Args:
        limit_bytes: the device's memory, shown as a line.
    """
    figure, axes = new_picture(10, 4.8)
    largest = max(1, report.total_bytes)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    values = np.array(list(report.timeline.values()), dtype=np.float64) / unit
    axes.stackplot(
        report.moments,
        values,
        labels=list(report.timeline),
        colors=[_COLORS[role] for role in report.timeline],
        step="post",
        linewidth=0,
    )
    peak = report.moments[report.peak_moment]
    height = values[:, report.peak_moment].sum()
    axes.axvline(peak, color="black", linewidth=0.8, linestyle=":")
    axes.axhline(report.total_bytes / unit, color="black", linewidth=0.8)
    left = report.moments[0]
    axes.text(left, report.total_bytes / unit, f" allocated {gib(report.total_bytes)}", va="bottom")
    if limit_bytes is not None:
        axes.axhline(limit_bytes / unit, color=RED, linewidth=1.2)
        axes.text(left, limit_bytes / unit, f" limit {gib(limit_bytes)}", va="bottom", color=RED)
    right = peak > 0.6 * report.moments[-1]
    axes.annotate(
        f"fullest in {report.peak_scope}\n{report.peak_operation}",
        xy=(peak, height),
        xytext=(-12 if right else 12, -34),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        fontsize=9,
        bbox={"boxstyle": "round", "facecolor": "white", "alpha": 0.85},
        arrowprops={"arrowstyle": "-"},
    )
    axes.set_xlim(report.moments[0], report.moments[-1])
    axes.set_ylim(0, 1.12 * max(report.total_bytes, limit_bytes or 0) / unit)
    axes.set_xlabel("instruction of the compiled program (a loop's body once)")
    axes.set_ylabel(f"{name} of one device")
    figure.legend(loc="outside right upper", fontsize=8, reverse=True)
    figure.savefig(file, dpi=120)
