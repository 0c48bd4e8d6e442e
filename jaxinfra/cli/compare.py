"""Compare runs: their results, and the settings in which they differ.

jaxinfra compare runs/small-1 runs/small-2 --picture curves.png
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfra.diagnostics.run_page import draw_curves
from jaxinfra.diagnostics.run_view import differing_settings, read_view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra compare``."""
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+", help="run directories")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses of the runs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Reads the runs and prints their comparison as a table or JSON."""
    views = [read_view(each) for each in args.runs]
    settings = differing_settings(views)
    headlines = [view.headline() for view in views]
    if args.picture is not None:
        draw_curves(views).savefig(args.picture, dpi=120)
    if args.json:
        rows = [{"run": str(v.path), **h} for v, h in zip(views, headlines, strict=True)]
        print(json.dumps({"runs": rows, "settings": settings}, indent=1))
        return 0
    table = Table("", *(view.path.name for view in views))
    for name in dict.fromkeys(name for each in headlines for name in each):
        table.add_row(name, *(each.get(name, "-") for each in headlines))
    for path, values in settings.items():
        table.add_row(path, *values, style="dim")
    Console().print(table)
    return 0
