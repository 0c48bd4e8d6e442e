"""Pages of the documentation that are made from the package: settings, presets, commands, API.

python tools/docs_pages.py DIR        writes them into DIR/reference
"""

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Iterator

import jaxinfra
from jaxinfra.cli.main import COMMANDS, Parser
from jaxinfra.config.run import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a config record, as its source describes it."""

    name: str
    type: str
    default: str
    text: str


def settings_of(record: type) -> list[Setting]:
    """The fields of a record, described by the comments beside or above them in its source."""
    lines = inspect.getsource(record).splitlines()
    tree = ast.parse(inspect.cleandoc("\n".join(lines)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    found = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(
                Setting(
                    name=node.target.id,
                    type=ast.unparse(node.annotation),
                    default="" if node.value is None else ast.unparse(node.value),
                    text=_comment(lines, node),
                )
            )
    return [each for each in found if not each.default.startswith("dataclasses.field")]


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """What is said of a field: on its line, on the lines above it, or in the text below it."""
    last = lines[(node.end_lineno or node.lineno) - 1]
    _, mark, beside = last.partition("  # ")
    if mark:
        return beside.strip()
    above: list[str] = []
    number = node.lineno - 2
    while number >= 0 and lines[number].strip().startswith("# "):
        above.insert(0, lines[number].strip().removeprefix("# "))
        number -= 1
    return " ".join(above)


def records(kind: object) -> Iterator[type]:
    """Every record that a type refers to, itself first, each once."""
    seen: set[type] = set()

    def walk(kind: object) -> Iterator[type]:
        if isinstance(kind, typing.TypeAliasType):
            kind = kind.__value__
        for part in typing.get_args(kind):
            yield from walk(part)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in seen:
            seen.add(kind)
            yield kind
            for hint in typing.get_type_hints(kind).values():
                yield from walk(hint)

    yield from walk(kind)


def enums(kind: type) -> dict[str, type[enum.Enum]]:
    """The enumerations that a record's fields are of, by field."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        options = (hint, *typing.get_args(hint)) if isinstance(hint, types.UnionType) else (hint,)
        for each in options:
            if isinstance(each, type) and issubclass(each, enum.Enum):
                found[name] = each
    return found


def settings_page() -> str:
    """Every setting of ``config.json``, by the record that it is in."""
    parts = [
        "# Settings\n",
        "Every setting of a run's `config.json`. `--set PATH=VALUE` sets one on the command line, "
        "as in `--set optimizer.learning_rate=1e-3`; TOML and YAML files have the same names.\n",
    ]
    for record in records(RunConfig):
        doc = inspect.getdoc(record) or ""
        parts.append(f"## {record.__name__}\n\n{doc}\n")
        rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
        choices = enums(record)
        for each in settings_of(record):
            options = choices.get(each.name)
            text = each.text
            if options is not None:
                named = ", ".join(f"`{member.value}`" for member in options)
                text = f"{text}: {named}" if text else f"one of {named}"
            default = f"`{each.default}`" if each.default else "required"
            kind = each.type.replace("|", "&#124;")
            cells = (f"`{each.name}`", kind, default, text.replace("|", "&#124;"))
            rows.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def presets_page() -> str:
    """The table of ``jaxinfra presets``."""
    rows = [
        "| preset | parameters | active | layers | positions | what for |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for each in jaxinfra.presets():
        cells = (
            f"`{each.name}`",
            f"{each.parameters:,}",
            f"{each.active_parameters:,}",
            str(each.layers),
            f"{each.max_positions:,}",
            each.purpose,
        )
        rows.append(f"| {' | '.join(cells)} |")
    intro = "`jaxinfra train NAME` trains one, `jaxinfra.preset(NAME)` is its config.\n"
    return f"# Presets\n\n{intro}\n" + "\n".join(rows) + "\n"


def commands_page() -> str:
    """What ``jaxinfra COMMAND --help`` prints, of every command."""
    parts = ["# Commands\n"]
    for name in COMMANDS:
        command = importlib.import_module(f"jaxinfra.cli.{name}")
        parser = Parser(prog=f"jaxinfra {name}", description=command.__doc__, allow_abbrev=False)
        command.add_arguments(parser)
        parser.formatter_class = _Wide
        parts.append(f"## {name}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


class _Wide(argparse.RawDescriptionHelpFormatter):
    """Help that is as wide on every machine."""

    def __init__(self, prog: str):
        super().__init__(prog, width=100)


def api_page() -> str:
    """A section for each public name, whose text is its docstring."""
    parts = [
        "# Python\n",
        "Everything here is a name of `jaxinfra`, and stays. It is imported at its first use.\n",
    ]
    for name in sorted(each for each in jaxinfra.__all__ if not each.startswith("_")):
        thing = getattr(jaxinfra, name)
        parts.append(f"::: {thing.__module__}.{name}\n    options:\n      heading_level: 2\n")
    return "\n".join(parts)


PAGES = {
    "settings.md": settings_page,
    "presets.md": presets_page,
    "commands.md": commands_page,
    "api.md": api_page,
}


def main(arguments: list[str]) -> int:
    """Writes the pages."""
    directory = pathlib.Path(arguments[0]) / "reference"
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (directory / name).write_text(make(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
