"""Named layouts of one model side by side, and the best that a search finds."""

from jaxinfra.errors import ConfigError
from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import PlannedModel
from jaxinfra.planning.plan import Plan, make_plan
from jaxinfra.planning.search import Question, search
from jaxinfra.planning.table import grid, show


def compare(
    title: str, model: PlannedModel, device: Device, layouts: dict[str, Layout], question: Question
) -> None:
    """Prints a row a layout: what it takes, how fast it is, where its time goes."""
    rows = []
    for name, layout in layouts.items():
        try:
            rows.append(_row(name, make_plan(model, layout, device)))
        except ConfigError as error:
            rows.append((name, "cannot run", "", "", "", str(error)))
    found = search(model, question, device, runners_up=3)
    rows.append(_row("best found", found.best))
    rows += [_row("runner-up", plan) for plan, _ in found.runners_up]
    columns = ("layout", "memory", "step", "MFU", "bubble", "mesh; most time beside matmuls")
    show(grid(title, columns, rows))


def _row(name: str, plan: Plan) -> tuple[str, ...]:
    parts = {part: s for part, s in plan.time.parts.items() if part != "matmul"}
    worst = sorted(parts, key=lambda part: -parts[part])[:2]
    spent = ", ".join(f"{part} {parts[part] / plan.time.total_s:.0%}" for part in worst)
    layout = plan.layout
    how = f"{layout.describe()}, {layout.accumulation} x {layout.micro_rows}, {layout.remat}"
    return (
        name,
        f"{plan.memory.total / 1e9:.0f} GB{'' if plan.fits else ': too much'}",
        f"{plan.time.total_s:.3g} s",
        f"{plan.mfu:.1%}",
        f"{plan.time.bubble_fraction:.0%}",
        f"{how}; {spent}",
    )
