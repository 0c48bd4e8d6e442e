"""Draws pallas_kernels/flash_attention/pictures/*.svg, for the README there.

    python -m experiments.pictures.attention

Tiles come from the kernels' own geometry, times from the units' rates, rescales from counting.
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from pallas_kernels.flash_attention.hopper.forward_kernel import RESCALE_ABOVE
from pallas_kernels.flash_attention.hopper.tiles import Geometry, key_tiles
from pallas_kernels.flash_attention.spec import AttentionSpec

FOLDER = pathlib.Path(__file__).parents[2] / "pallas_kernels" / "flash_attention" / "pictures"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#dddddd"
LENGTH, TILE = 1024, 128

# Cycles of one warpgroup's tile (64 queries, 128 keys, d 128, bf16) on an SM: a product
# is 2 * 64 * 128 * 128 operations at 4096 a cycle, its 8192 exponentials leave at 16 a cycle.
PRODUCT, SOFTMAX = 512, 512


def tiles_picture() -> plt.Figure:
    """Plots the tiles of the score matrix that are skipped, computed, and masked."""
    size = LENGTH // TILE
    g = Geometry(B=1, T=LENGTH, S=LENGTH, N=1, K=1, H=128, Hv=128)
    masks = {
        "full": AttentionSpec(scale=1.0),
        "causal": AttentionSpec(scale=1.0, right=0),
        "window of 300 keys": AttentionSpec(scale=1.0, right=0, left=299),
    }
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    for axes, (title, spec) in zip(panels, masks.items(), strict=True):
        visited = 0
        for i in range(size):
            keys = key_tiles(spec, g, jnp.int32(i * TILE), TILE, TILE).ordered(at_least_one=True)
            lo, full_lo, full_hi, hi = (
                int(x) for x in (keys.lo, keys.full_lo, keys.full_hi, keys.hi)
            )
            for j in range(size):
                inside, whole = lo <= j < hi, full_lo <= j < full_hi
                visited += inside
                colour = BLUE if whole else ORANGE if inside else "white"
                axes.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=colour, edgecolor=GREY))
                if inside:  # the order in which a block takes them
                    axes.text(j + 0.5, i + 0.5, hi - j, ha="center", va="center", color="white")
        axes.set(xlim=(0, size), ylim=(size, 0), xlabel="key tile")
        axes.set_title(f"{title}: {visited} of {size * size} tiles", fontsize=10)
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks(np.arange(size) + 0.5, [f"starts {size - i}." for i in range(size)])
        axes.tick_params(length=0, labelsize=7)
    panels[0].set_ylabel("query tile: one block each")
    names = {"no mask needed": BLUE, "masked": ORANGE, "skipped": "white"}
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=c, edgecolor=GREY, label=n) for n, c in names.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


@dataclasses.dataclass(frozen=True)
class Bar:
    """Something that takes a unit for some cycles."""

    row: str
    start: int
    cycles: int
    text: str
    colour: str


ROWS = ("tensor cores", "warpgroup 0: softmax", "warpgroup 1: softmax")
SHADES = (BLUE, GREEN)


def timeline(num_tiles: int, *, overlap: bool, turns: bool) -> list[Bar]:
    """Schedules each product and softmax, delayed only by the units and their order.

    Args:
        num_tiles: key tiles of each of two warpgroups.
        overlap: a warpgroup issues the scores of its next tile before the value product.
        turns: the other warpgroup starts half a period later.
    """
    bars: list[Bar] = []
    free = 0  # the tensor cores
    ready = [0, 0]  # when a warpgroup may issue its next matmul
    softmax_free = 0  # the special function units are shared by the warpgroups

    def product(wg: int, text: str, earliest: int) -> int:
        nonlocal free
        start = max(free, earliest)
        bars.append(Bar(ROWS[0], start, PRODUCT, f"{text} {wg}", SHADES[wg]))
        free = start + PRODUCT
        return free

    def softmax(wg: int, tile: int, earliest: int) -> int:
        nonlocal softmax_free
        start = max(earliest, softmax_free)
        bars.append(Bar(ROWS[1 + wg], start, SOFTMAX, f"tile {tile}", SHADES[wg]))
        softmax_free = start + SOFTMAX
        return start + SOFTMAX

    if not overlap and not turns:  # in step: all wait for the scores, then all for the softmax
        for tile in range(num_tiles):
            scores = [product(wg, "QK", max(ready)) for wg in (0, 1)]
            done = [softmax(wg, tile, max(scores)) for wg in (0, 1)]
            ready = [product(wg, "PV", max(done)) for wg in (0, 1)]
        return bars
    done = [softmax(wg, 0, product(wg, "QK", ready[wg])) for wg in (0, 1)]
    for tile in range(1, num_tiles):
        for wg in (0, 1):
            # With overlap, the next tile's scores do not wait for the last probabilities.
            scores = product(wg, "QK", ready[wg] if overlap else done[wg])
            ready[wg] = product(wg, "PV", done[wg])
            done[wg] = softmax(wg, tile, scores)
    for wg in (0, 1):
        product(wg, "PV", done[wg])
    return bars


def timeline_picture() -> plt.Figure:
    """Two warpgroups in step, and alternating with overlap."""
    forms = {
        "in step: whoever waits, all wait": timeline(4, overlap=False, turns=False),
        "in turns, the next scores issued before the value product": timeline(
            4, overlap=True, turns=True
        ),
    }
    figure, panels = plt.subplots(2, 1, figsize=(10, 4.2), layout="constrained", sharex=True)
    for axes, (title, bars) in zip(panels, forms.items(), strict=True):
        for bar in bars:
            y = ROWS.index(bar.row)
            axes.add_patch(
                plt.Rectangle(
                    (bar.start, y + 0.1), bar.cycles, 0.8, facecolor=bar.colour, edgecolor="white"
                )
            )
            axes.text(
                bar.start + bar.cycles / 2, y + 0.5, bar.text, ha="center", va="center",
                color="white", fontsize=7,
            )  # fmt: skip
        end = max(bar.start + bar.cycles for bar in bars)
        busy = sum(bar.cycles for bar in bars if bar.row == ROWS[0]) / end
        axes.axvline(end, color=ORANGE, linewidth=1)
        axes.set_title(f"{title}: {end} cycles, tensor cores busy {busy:.0%}", fontsize=10)
        axes.set(ylim=(3, 0))
        axes.set_yticks(np.arange(3) + 0.5, ROWS)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[1].set_xlabel("cycles of one multiprocessor; 64 queries x 128 keys a tile, d 128, bf16")
    panels[1].set_xlim(0, None)
    panels[1].autoscale(axis="x")
    return figure


def rescale_picture() -> plt.Figure:
    """Plots how often the sum must be rescaled, with and without patience."""
    rng = np.random.default_rng(0)
    rows, tiles = 4096, 64
    # Scores of unit-variance queries and keys, in units of log2.
    top = np.log2(np.e) * rng.standard_normal((rows, tiles, TILE)).max(axis=2)
    running = np.maximum.accumulate(top, axis=1)
    lazy = np.empty_like(running)
    lazy[:, 0] = running[:, 0]
    for t in range(1, tiles):
        grown = running[:, t] - lazy[:, t - 1] > RESCALE_ABOVE
        lazy[:, t] = np.where(grown, running[:, t], lazy[:, t - 1])

    def rescaled(reference: np.ndarray) -> np.ndarray:
        """Share of warps (16 rows) of which a row's reference moved at a tile."""
        moved = np.diff(reference, axis=1) != 0
        return moved.reshape(rows // 16, 16, tiles - 1).any(axis=1).mean(axis=0)

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    left.plot(top[3], ".", color=GREY, label="largest score of each tile")
    left.step(range(tiles), running[3], where="post", color=BLUE, label="running maximum")
    left.step(range(tiles), lazy[3], where="post", color=ORANGE, label="reference, lazy")
    left.set(xlabel="key tile of 128", ylabel="log2 units", title="one row")
    left.set_ylim(None, running[3].max() + 0.9)
    left.legend(fontsize=8, frameon=False, loc="upper right", ncols=3, columnspacing=0.8)
    eager = rescaled(running)
    right.step(range(1, tiles), eager, where="mid", color=BLUE, label="running maximum")
    right.step(range(1, tiles), rescaled(lazy), where="mid", color=ORANGE, label="lazy")
    right.set(
        xlabel="key tile of 128", ylim=(-0.03, 1),
        title=f"warps (16 rows) that rescale; eager {eager.mean():.0%}, lazy "
        f"{rescaled(lazy).mean():.0%} of tiles",
    )  # fmt: skip
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.title.set_fontsize(10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def backward_picture() -> plt.Figure:
    """Plots the reads, products and writes of one block of the fused backward."""
    figure, axes = plt.subplots(figsize=(10, 4.4), layout="constrained")
    boxes = {  # x, y, text, colour
        "k": (0, 3.0, "K, V\nof 128 keys: stay", GREY),
        "q": (0, 0.6, "Q, dO, logsumexp, delta\nof 64 queries: stream by", GREY),
        "s": (3, 3.0, "S = Q K'\nP = exp(S - logsumexp)", BLUE),
        "dp": (3, 0.6, "dP = dO V'\ndS = P (dP - delta)", BLUE),
        "dv": (6.2, 3.6, "dV += P' dO", GREEN),
        "dk": (6.2, 2.0, "dK += dS' Q", GREEN),
        "dq": (6.2, 0.4, "dQ tile = dS K", ORANGE),
        "out": (
            9.1,
            2.8,
            "dK, dV written once,\nsummed over the query\nheads that share them",
            GREY,
        ),
        "sum": (9.1, 0.4, "added to fp32 dQ in\nmemory by the copy\nengine, then cast", GREY),
    }
    width, height = 2.3, 0.95
    for x, y, text, colour in boxes.values():
        axes.add_patch(
            plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", zorder=2)
        )
        dark = colour == GREY
        axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, zorder=3,
            color="black" if dark else "white",
        )  # fmt: skip
    arrows = ("k s", "k dp", "q s", "q dp", "s dp", "s dv", "dp dk", "dp dq", "dv out", "dk out",
              "dq sum")  # fmt: skip
    for arrow in arrows:
        start, end = (boxes[name] for name in arrow.split())
        vertical = start[0] == end[0]
        tail = (start[0] + width / 2, start[1]) if vertical else (start[0] + width, start[1] + 0.48)
        head = (end[0] + width / 2, end[1] + height) if vertical else (end[0], end[1] + 0.48)
        axes.annotate(
            "", head, tail, arrowprops={"arrowstyle": "->", "color": "#555555", "linewidth": 1.2}
        )
    labels = {1.15: "shared memory", 4.15: "registers", 7.35: "registers, fp32",
              10.25: "memory"}  # fmt: skip
    for x, text in labels.items():
        axes.text(x, 4.9, text, ha="center", fontsize=9, color="#555555")
    axes.set(xlim=(-0.1, 11.6), ylim=(0.2, 5.2))
    axes.axis("off")
    return figure


PICTURES = {
    "tiles": tiles_picture,
    "timeline": timeline_picture,
    "rescale": rescale_picture,
    "backward": backward_picture,
}


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "attention"  # equal pictures are equal files
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
