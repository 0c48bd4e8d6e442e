"""Show a run while it trains, from its directory, which may be on a shared disk.

jaxinfra watch runs/small-1
"""

import argparse
import time
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from jaxinfra.diagnostics.run_view import RunView, read_view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra watch``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between updates (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print once, and stop")


def run(args: argparse.Namespace) -> int:
    """Shows a run in the terminal until it is complete or the user interrupts."""
    if args.once:
        Console().print(_shown(read_view(args.run)))
        return 0
    with Live(refresh_per_second=4) as live:
        while True:
            view = read_view(args.run)
            live.update(_shown(view))
            if view.summary is not None:
                return 0
            time.sleep(args.every)


def _shown(view: RunView) -> RenderableType:
    cells = view.headline().items()
    head = Columns(  # as many beside one another as the terminal is wide
        [Text.assemble((name, "dim"), "\n", value) for name, value in cells], padding=(0, 2)
    )
    parts: list[RenderableType] = [str(view.path), head]
    whole = sum(view.causes.values())
    if whole:
        shares = sorted(view.causes.items(), key=lambda item: -item[1])
        parts.append("wall time: " + ", ".join(f"{c} {s / whole:.0%}" for c, s in shares[:6]))
    if len(view.ranks) > 1:
        parts += [
            f"rank {rank}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in each.items())
            for rank, each in sorted(view.ranks.items())
        ]
    if view.explanation is not None:
        parts.append(view.explanation.paragraph())
    parts += view.incident_lines()
    return Group(*parts)
