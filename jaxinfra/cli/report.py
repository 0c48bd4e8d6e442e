"""Write a run's report to one HTML file: delays, curves, time, ranks, incidents, settings.

jaxinfra report runs/small-1                  writes runs/small-1/report.html
"""

import argparse
from pathlib import Path

from jaxinfra.checkpoint.run_directory import write_atomically
from jaxinfra.diagnostics.run_page import run_page
from jaxinfra.diagnostics.run_view import read_view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra report``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")


def run(args: argparse.Namespace) -> int:
    """Reads a run and writes its HTML report."""
    view = read_view(args.run)
    page = run_page(view)
    file = args.out or args.run / "report.html"
    write_atomically(file, page)
    print(f"{file}: {len(page) / 1e6:.2f} MB")
    explained = [] if view.explanation is None else [view.explanation.paragraph()]
    print("\n".join([*view.incident_lines(), *explained]))
    return 0
