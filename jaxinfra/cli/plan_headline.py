"""What a plan comes to: the layout, the command that trains so, and what is odd about it."""

import dataclasses

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import Remat
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.plan import Plan
from jaxinfra.planning.step import step_time

_ROOM = 1.5  # what trained mixtures need, whose loads are balanced by a loss or a bias


def headline(plan: Plan, *, searched: bool) -> list[str]:
    """Lines that come before the tables.

    Args:
        searched: the layout was found, not given.
    """
    layout, seconds = plan.layout, plan.time.total_s
    best = "fastest that fits: " if searched and plan.fits else ""
    mesh = f", {layout.describe()}" if layout.devices > 1 else ""
    lines = [
        f"{best}{plan.model.name} on {layout.devices} {plan.device.name}{mesh}: "
        f"{seconds:.4g} s per step, {plan.tokens_per_s_per_device:,.0f} tokens/s per GPU, MFU "
        f"{plan.mfu:.1%}, {plan.memory.total / 1e9:,.1f} of {plan.device.hbm_bytes / 1e9:,.0f} GB"
    ]
    command = train_command(plan.model.name, plan.asked)
    if command is not None and plan.fits:
        lines.append(f"  {command}")
    return [*lines, *_why_slower(plan), *_spare_room(plan), ""]


def train_command(name: str, layout: Layout) -> str | None:
    """The ``jaxinfra train`` command of a layout; None where none trains in its number formats.

    Args:
        name: of a preset, or the directory of a model.
    """
    if layout.recipe != "bf16":
        return None
    start = name if name in MODELS else f"--init {name}"
    mesh = ",".join(f"{axis}={n}" for axis, n in _sizes(layout.mesh).items() if n > 1)
    options = {
        "--mesh": mesh,
        "--batch-size": layout.batch,
        "--accumulation": layout.accumulation,
        "--sequence-length": layout.length,
        "--remat": layout.remat.value,
        "--zero": layout.zero if layout.mesh.fsdp > 1 and 0 < layout.zero < 3 else None,
        "--sequence-parallel": "true" if layout.sequence_parallel else None,
        "--schedule": "interleaved" if layout.chunks > 1 else None,
        "--policy": "bf16",
    }
    words = [f"{option} {value}" for option, value in options.items() if value]
    if layout.mesh.expert > 1:
        chosen = {name: getattr(layout.exchange, name) for name in ("room_factor", "node_size")}
        words += [f"--set exchange.{name}={value:g}" for name, value in chosen.items() if value]
    if layout.chunks > 1:
        words.append(f"--set pipeline.chunks={layout.chunks}")
    if layout.keep_gathered is not None and layout.may_keep_gathered:
        words.append(f"--set sharding.keep_gathered={str(layout.keep_gathered).lower()}")
    return " ".join(["jaxinfra train", start, *words])


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    return {**mesh.sizes(), "expert": mesh.expert}


def _spare_room(plan: Plan) -> list[str]:
    """What buffers for any load cost, where tokens travel to experts on other devices."""
    layout = plan.layout
    if layout.mesh.expert == 1 or layout.exchange.room_factor is not None:
        return []
    exchange = dataclasses.replace(layout.exchange, room_factor=_ROOM)
    tight = dataclasses.replace(layout, exchange=exchange)
    saved = plan.time.total_s - step_time(plan.model, tight, plan.device).total_s
    return [
        f"  the exchange between experts has room for any load; --room {_ROOM:g} (of the mean; "
        f"what exceeds it is left out and counted) would take {1e3 * saved:,.0f} ms less"
    ]


def _why_slower(plan: Plan) -> list[str]:
    """Says so where keeping everything is predicted to be slower than recomputing some of it."""
    forms = plan.by_remat()
    none, dots = forms[Remat.NONE.value].time, forms[Remat.DOTS.value].time
    if none.total_s <= dots.total_s:
        return []
    growth = {name: seconds - dots.parts.get(name, 0.0) for name, seconds in none.parts.items()}
    part = max(growth, key=growth.__getitem__)
    return [
        f"  remat=none is {1e3 * (none.total_s - dots.total_s):,.0f} ms slower than dots: what it "
        f"keeps is written and read again ({part} takes {1e3 * growth[part]:,.0f} ms more), and "
        "recomputing costs less than that"
    ]
