"""The option of commands that render conversations, for settings of the chat template."""

import argparse
from typing import Any

from jaxinfra.config.codec import parse_values


def add_template_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declares ``--template``, which may be given several times."""
    parser.add_argument(
        "--template",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable that the model's chat template reads, such as enable_thinking=false",
    )


def template_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the chat template that ``--template`` gives."""
    return parse_values(args.template, what="--template")
