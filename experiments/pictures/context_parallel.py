"""Draws docs/context-parallel-*.svg: the tokens of each device, and the tiles that a ring's steps
compute.

    python -m experiments.pictures.context_parallel

The order comes from the code that trains; nothing here is plotted by hand.
"""

import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from jaxinfra.parallel.zigzag import chunk_order

DEVICES = 4
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
DOCS = pathlib.Path(__file__).parents[2] / "docs"


def owners() -> np.ndarray:
    """The device of each chunk of the sequence."""
    owner = np.empty(2 * DEVICES, int)
    for slot, chunk in enumerate(chunk_order(DEVICES)):
        owner[chunk] = slot // 2
    return owner


def step_of(query: int, key: int, owner: np.ndarray) -> int:
    """The step of the ring in which the query's device holds the key's chunk."""
    return int(owner[query] - owner[key]) % DEVICES


def draw_blocks(axes, owner: np.ndarray, *, title: str) -> None:
    """The causal score matrix by chunks: the colour is who computes, the number when."""
    size = len(owner)
    for query in range(size):
        for key in range(query + 1):
            axes.add_patch(
                plt.Rectangle(
                    (key, query), 1, 1, facecolor=COLOURS[owner[query]], edgecolor="white"
                )
            )
            axes.text(
                key + 0.5,
                query + 0.5,
                step_of(query, key, owner),
                ha="center",
                va="center",
                color="white",
            )
        blocks = sum(q + 1 for q in range(size) if owner[q] == owner[query])
        axes.text(
            size + 0.2,
            query + 0.5,
            f"device {owner[query]} ({blocks - 1} blocks in all)",
            va="center",
            color=COLOURS[owner[query]],
            fontsize=8,
        )
    axes.set(
        xlim=(0, size + 4.2), ylim=(size, 0), xlabel="key chunk", ylabel="query chunk", title=title
    )
    axes.set_xticks(np.arange(size) + 0.5, range(size))
    axes.set_yticks(np.arange(size) + 0.5, range(size))
    axes.set_aspect("equal")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_timeline(axes) -> None:
    """One device's compute and link, forward and backward."""
    rows = {"compute": 1, "link": 0}

    def bar(row: str, start: float, length: float, text: str, colour: str) -> None:
        axes.barh(rows[row], length, left=start, height=0.7, color=colour, edgecolor="white")
        axes.text(start + length / 2, rows[row], text, ha="center", va="center", fontsize=7)

    steps = range(DEVICES)
    for step in steps:  # the own chunks are half visible: two blocks of work, as any other step
        bar("compute", 2 * step, 2, "own" if step == 0 else f"step {step}", "#99c7e0")
        if step < DEVICES - 1:
            bar("link", 2 * step, 1, f"K V of {step + 1}", "#f5d899")
    start = 2 * DEVICES + 1
    bar("link", start - 1, 1, "K V of 1", "#f5d899")
    for step in range(1, DEVICES):
        at = start + 3 * (step - 1)
        bar("compute", at, 3, f"gradients of step {step}", "#99d8c7")
        sent = [f"K V of {step + 1}"] if step < DEVICES - 1 else []
        sent += [f"dK dV up to {step - 1}"] if step > 1 else []
        bar("link", at, 1 + 0.8 * (step > 1), "\n".join(sent), "#f5d899")
    at = start + 3 * (DEVICES - 1)
    bar("compute", at, 3, "gradients of own", "#99d8c7")
    bar("link", at, 1.4, "dK dV home", "#f5d899")
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set(xlabel="time, not to scale: a send is a few percent of a step", title="one device")
    axes.set_xticks([])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Writes both pictures."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 5))
    plain = np.repeat(np.arange(DEVICES), 2)
    draw_blocks(axes[0], plain, title="in order: the last device works longest")
    draw_blocks(axes[1], owners(), title="zig-zag: equal work in every step")
    figure.tight_layout()
    figure.savefig(DOCS / "context-parallel-zigzag.svg", metadata={"Date": None})
    figure, axes = plt.subplots(figsize=(13, 2.6))
    draw_timeline(axes)
    figure.tight_layout()
    figure.savefig(DOCS / "context-parallel-ring.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
