"""List presets: their sizes, and the use of each.

jaxinfra presets                 all of them
jaxinfra presets qwen            those with this text in their name
jaxinfra presets --json
"""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table

from jaxinfra.api.presets import presets
from jaxinfra.config.presets import MODELS
from jaxinfra.errors import ConfigError, nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra presets``."""
    parser.add_argument("name", nargs="?", default="", help="text that the listed names contain")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the presets as a table or JSON."""
    found = presets(args.name)
    if not found:
        raise ConfigError(f"no preset is named {args.name!r}{nearest(args.name, MODELS)}")
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
        return 0
    table = Table("preset", "parameters", "active", "layers", "positions", "what for")
    for each in found:
        active = "" if each.active_parameters == each.parameters else _size(each.active_parameters)
        cells = (_size(each.parameters), active, str(each.layers), f"{each.max_positions:,}")
        table.add_row(each.name, *cells, each.purpose)
    Console(width=None if Console().is_terminal else 110).print(table)
    return 0


def _size(count: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:,}"
