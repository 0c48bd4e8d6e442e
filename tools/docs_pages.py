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
import re
import sys
import types
import typing
from collections.abc import Iterator

import jaxinfra
import pallas_kernels
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
    """Documentation of a field: the comment on its line or above it, or the string below it."""
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
        meaning = re.split(r"\n(?:Raises|Examples):", inspect.getdoc(record) or "")[0]
        parts.append(f"## {record.__name__}\n\n{meaning}\n")
        parts.append(_table(record, settings_of(record), head="setting"))
    return "\n".join(parts)


def _table(record: type, fields: list[Setting], *, head: str) -> str:
    """The fields of a record with types, defaults and meanings."""
    rows = [f"| {head} | type | default | meaning |", "|---|---|---|---|"]
    choices = enums(record)
    for each in fields:
        options = choices.get(each.name)
        text = each.text
        if options is not None:
            named = ", ".join(f"`{member.value}`" for member in options)
            text = f"{text}: {named}" if text else f"one of {named}"
        default = f"`{each.default}`" if each.default else "required"
        kind = each.type.replace("|", "&#124;")
        # Stars are dims here, not emphasis.
        text = re.sub(r"\*(?=[^`]*(`[^`]*`[^`]*)*$)", r"\\*", text.replace("|", "&#124;"))
        rows.append(f"| `{each.name}` | {kind} | {default} | {text} |")
    return "\n".join(rows) + "\n"


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
    """Page with the output of ``jaxinfra COMMAND --help`` for every command."""
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
        super().__init__(prog, width=96)


def public_names(package: types.ModuleType) -> list[str]:
    """The names that a package promises, in the order of the alphabet."""
    return sorted(name for name in package.__all__ if name != "__version__")


# Chapter of a name, by the module that defines it; the first prefix that fits.
_GROUPS = {
    "jaxinfra.api.presets": "Begin with a config",
    "jaxinfra.config.codec": "Begin with a config",
    "jaxinfra.config.files": "Begin with a config",
    "jaxinfra.training.metrics": "Callbacks and loggers",
    "jaxinfra.training": "Train",
    "jaxinfra.data": "Train",
    "jaxinfra.serving": "Trained models",
    "jaxinfra.api.models": "Trained models",
    "jaxinfra.api.analysis": "Plan and profile",
    "jaxinfra.config.own": "Parts of your own",
    "jaxinfra.config.customize": "Parts of your own",
    "jaxinfra.config.parts": "Parts of your own",
    "jaxinfra.model.passes": "Parts of your own",
    "jaxinfra.errors": "Errors",
    "jaxinfra": "Records of a config",
}


def _group(name: str) -> str:
    module = getattr(jaxinfra, name).__module__
    return next(group for prefix, group in _GROUPS.items() if module.startswith(prefix))


def _section(thing: typing.Any, name: str, *, level: int) -> str:
    """A name's docstring, and a table of its fields where it is a record."""
    options = f"    options:\n      heading_level: {level}\n      members: {_members(thing)}\n"
    text = f"::: {thing.__module__}.{name}\n{options}"
    if dataclasses.is_dataclass(thing) and (fields := settings_of(typing.cast("type", thing))):
        text += "\n" + _table(typing.cast("type", thing), fields, head="field")
    return text


def _members(thing: typing.Any) -> list[str]:
    """Methods that a reader of a class needs; a record's properties serve the package."""
    if not isinstance(thing, type) or dataclasses.is_dataclass(thing):
        return []
    return [name for name, each in vars(thing).items() if name[0] != "_" and inspect.getdoc(each)]


def api_pages() -> dict[str, str]:
    """The pages of the Python reference by file: a list of all names, and a page for each chapter,
    with a section for each name whose text is its docstring.
    """
    names = public_names(jaxinfra)
    chapters = {g: [n for n in names if _group(n) == g] for g in dict.fromkeys(_GROUPS.values())}
    listed = [
        "# Python\n",
        "Everything here is a name of `jaxinfra`, and stays. It is imported at its first use. "
        "[How to write an experiment](../python.md) uses them in order.\n",
        "The examples begin with `import jaxinfra`, and where they need them `import dataclasses`, "
        "`import pathlib`, `import jax`, `import jax.numpy as jnp`, `import numpy as np` and "
        "`from flax import nnx`. `runs/mine` is a run, `mine.toml` its config, `texts` a "
        "directory of text files. Each is run by the tests.\n",
        "| page | names |\n|---|---|",
    ]
    pages = {}
    for chapter, own in chapters.items():
        file = f"api-{chapter.lower().replace(' ', '-')}.md"
        links = ", ".join(f"[`{n}`]({file}#{getattr(jaxinfra, n).__module__}.{n})" for n in own)
        listed.append(f"| [{chapter}]({file}) | {links} |")
        sections = [_section(getattr(jaxinfra, name), name, level=2) for name in own]
        pages[file] = "\n".join([f"# {chapter}\n", *sections])
    return {"api.md": "\n".join(listed) + "\n", **pages}


def kernels_page() -> str:
    """A section for each public name of the kernels."""
    parts = [
        "# Kernels\n",
        "Everything here is a name of `pallas_kernels`, which needs JAX and nothing of `jaxinfra`. "
        "Every function runs on any device: `implementation` chooses, and `auto` takes a Hopper "
        "kernel where it is the fastest. The examples begin with `import pallas_kernels` and "
        "`import jax.numpy as jnp`, and are run by the tests.\n",
        "Dims: B batch, T queries, S keys, N query heads, K key/value heads, H width of a head, V "
        "width of a value; of matrices M rows, K the contracted dim, N columns, G groups.\n",
    ]
    for name in public_names(pallas_kernels):
        parts.append(_section(getattr(pallas_kernels, name), name, level=2))
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """All pages that are made, by file."""
    return {
        "settings.md": settings_page(),
        "presets.md": presets_page(),
        "commands.md": commands_page(),
        "kernels.md": kernels_page(),
        **api_pages(),
    }


def main(arguments: list[str]) -> int:
    """Writes the pages."""
    directory = pathlib.Path(arguments[0]) / "reference"
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
