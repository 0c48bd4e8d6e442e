"""The picture of what recomputation costs: bytes of a step against the time of computing again."""

from pathlib import Path

from jaxinfra.runtime.picture_style import BLUE, GRAY, ORANGE, RED, new_picture
from jaxinfra.training.recompute.budget import Choice
from jaxinfra.training.recompute.optimal import KeptChoice


def draw_choice(choice: Choice | KeptChoice | None, file: Path) -> None:
    """The cheapest recomputation for each budget, the fixed policies, and what was chosen; nothing
    where no budget decided.
    """
    if not isinstance(choice, KeptChoice):
        return
    sizes, seconds = zip(*choice.tradeoff.cheapest, strict=True)
    everything = [*sizes, choice.budget_bytes, choice.need_bytes]
    unit, name = (2**30, "GiB") if max(sizes) >= 2**30 else (2**20, "MiB")
    figure, axes = new_picture(8, 4.5)
    axes.step(
        [size / unit for size in sizes],
        [1e3 * each for each in seconds],
        where="post",
        color=BLUE,
        marker=".",
        label="the cheapest for each budget, predicted",
    )
    for remat, (size, time) in choice.tradeoff.policies.items():
        axes.plot(size / unit, 1e3 * time, "o", color=ORANGE, clip_on=False)
        axes.annotate(
            f"remat={remat.value}",
            (size / unit, 1e3 * time),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=9,
        )
        everything.append(size)
    axes.plot(
        choice.need_bytes / unit,
        1e3 * choice.seconds,
        "*",
        color=RED,
        markersize=13,
        clip_on=False,
        label="chosen: bytes of its compiled step",
    )
    # A budget far above all that a step can use would squeeze the rest.
    right = 1.15 * max(size for size in everything if size != choice.budget_bytes)
    if choice.budget_bytes <= right:
        axes.axvline(choice.budget_bytes / unit, color=GRAY, linewidth=1.0, linestyle=":")
        top = axes.get_xaxis_transform()
        axes.text(choice.budget_bytes / unit, 1.0, " budget", color=GRAY, transform=top)
    axes.set_xlim(0.97 * min(everything) / unit, right / unit)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{name} of a device that a step needs")
    axes.set_ylabel("ms computed again in a step, predicted")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    partial = file.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.rename(file)
