"""Draws docs/parallelism-*.svg: the devices' parts of a matrix, and the traffic of a step.

    python -m experiments.pictures.parallelism

Parts come from the placement that trains. Traffic is the table that ``tests/sharded/test_zero.py``
and ``test_collectives.py`` hold compiled programs to.
"""

import pathlib

import jax
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from jaxinfra import axes
from jaxinfra.config.mesh import ShardingConfig, parse_mesh
from jaxinfra.parallel.mesh import Rules, make_mesh, state_rules
from jaxinfra.parallel.place import Placement

DEVICES = 4
SHAPE = (8, 8)  # shape [embed, mlp] of the plotted matrix, mlp/up
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
DOCS = pathlib.Path(__file__).parents[2] / "docs"
STRATEGIES = (
    ("replica=4", 3),
    ("fsdp=4", 1),
    ("fsdp=4", 2),
    ("fsdp=4", 3),
    ("tensor=4", 3),
    ("fsdp=2,tensor=2", 3),
)

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
# (title, what a layer's forward pass, its backward pass and the update communicate)
MOVES = (
    ("replica, K = 1", "", f"{REDUCE} dW", ""),
    ("replica, K > 1", "", "", f"{REDUCE} sum of dW"),
    ("zero 1", "", "", f"{SCATTER} sum of dW, {GATHER} W"),
    ("zero 2", "", f"{SCATTER} dW", f"{GATHER} W"),
    ("zero 3 (fsdp)", f"{GATHER} W", f"{GATHER} W, {SCATTER} dW", ""),
    ("tensor", f"2 x {REDUCE} x", f"2 x {REDUCE} dx", ""),
    (
        "tensor, sequence parallel",
        f"2 x ({GATHER} x, {SCATTER} x)",
        f"2 x ({GATHER}, {SCATTER} dx), {REDUCE} norms",
        "",
    ),
)


def held(placement: Placement, rules: Rules) -> list[tuple[slice, slice]]:
    """Rows and columns of the matrix on each device."""
    sharding = placement.sharding((axes.EMBED, axes.MLP), rules)
    by_device = sharding.devices_indices_map(SHAPE)
    parts = [by_device[device] or () for device in placement.mesh.devices.flat]
    return [(rows, columns) for rows, columns in parts]


def draw_places() -> plt.Figure:
    """A row of pictures for each kind of tensor, a column for each strategy, four devices each."""
    figure, panels = plt.subplots(3, len(STRATEGIES), figsize=(12, 5.6))
    for column, (mesh, zero) in enumerate(STRATEGIES):
        placement = Placement(
            mesh=make_mesh(parse_mesh(mesh)), rules=state_rules(ShardingConfig(zero=zero))
        )
        rules = placement.rules
        kinds = {
            "parameters": rules.parameters,
            "gradients": rules.gradients,
            "moments": rules.optimizer,
        }
        for row, (kind, table) in enumerate(kinds.items()):
            panel = panels[row][column]
            for device, (rows, columns) in enumerate(held(placement, table)):
                left, top = (device % 2) * (SHAPE[1] + 2), (device // 2) * (SHAPE[0] + 2)
                panel.add_patch(Rectangle((left, top), *SHAPE, fill=False, ec="#999999", lw=0.8))
                first_row, last_row, _ = rows.indices(SHAPE[0])
                first, last, _ = columns.indices(SHAPE[1])
                size = (last - first, last_row - first_row)
                part = Rectangle((left + first, top + first_row), *size, fc=COLOURS[device])
                panel.add_patch(part)
            panel.set_xlim(-1, 2 * SHAPE[1] + 3)
            panel.set_ylim(2 * SHAPE[0] + 3, -1)
            panel.set_aspect("equal")
            panel.axis("off")
            if row == 0:
                stage = f"\nzero={zero}" if mesh == "fsdp=4" else "\n"
                panel.set_title(mesh + stage, fontsize=10)
            if column == 0:
                panel.text(-2, SHAPE[0] + 1, kind, rotation=90, va="center", ha="right")
    figure.suptitle("What each of four devices holds of one matrix (embed down, mlp across)")
    figure.tight_layout()
    return figure


def draw_moves() -> plt.Figure:
    """A line for each strategy: its communication under the compute that it belongs to."""
    figure, panel = plt.subplots(figsize=(12, 5.2))
    columns = (("forward pass, each layer", 3.0), ("backward pass, each layer", 8.2))
    columns = (*columns, ("update, once per step", 13.4))
    for title, left in columns:
        panel.add_patch(Rectangle((left, -1.1), 5.0, 0.7, fc="#dddddd"))
        panel.text(left + 2.5, -0.75, title, ha="center", va="center")
    for line, (title, *moves) in enumerate(MOVES):
        panel.text(2.8, line + 0.35, title, ha="right", va="center")
        for (_, left), move in zip(columns, moves, strict=True):
            if move:
                panel.add_patch(Rectangle((left, line), 5.0, 0.7, fc=_colour(move), alpha=0.45))
                panel.text(left + 2.5, line + 0.35, move, ha="center", va="center", fontsize=8)
    panel.set_xlim(-0.8, 18.6)
    panel.set_ylim(len(MOVES), -1.3)
    panel.axis("off")
    panel.set_title("What moves when: W weights, dW their gradients, x activations of a half block")
    figure.tight_layout()
    return figure


def _colour(move: str) -> str:
    return COLOURS[3] if " x" in move or "dx" in move else COLOURS[0 if GATHER in move else 1]


def main() -> None:
    """Writes the pictures."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    plt.rcParams.update({"svg.hashsalt": "jaxinfra", "svg.fonttype": "none"})
    for name, draw in (("places", draw_places), ("moves", draw_moves)):
        file = DOCS / f"parallelism-{name}.svg"
        draw().savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
