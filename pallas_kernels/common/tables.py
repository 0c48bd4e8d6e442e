"""Tuning tables as JSON files: measured times of choices, per op, question and kind of device.

A row gives the milliseconds that a choice took in a case. Files are strict: unknown fields are an
error, because a half-read table would silently pick slow kernels.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from . import device
from .errors import InputError

SCHEMA = 1
USER_FOLDER_VARIABLE = "PALLAS_KERNELS_TABLES"
"""Environment variable that names a folder of the user's own tables: OP/QUESTION-DEVICE.json.
Without it they are in ``pallas_kernels`` of the user's cache folder."""

type Value = str | int | float | bool | None


class TableError(InputError):
    """Error for a tuning table's file whose contents differ from what ``save`` writes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement of a tuning table: the time in ms of a choice (tiles, form) in a case."""

    case: tuple[tuple[str, Value], ...]  # sorted by name
    choice: tuple[tuple[str, Value], ...]
    ms: float

    @classmethod
    def of(cls, *, case: dict[str, Value], choice: dict[str, Value], ms: float) -> "Row":
        """Makes a table's row from plain dicts of a case and a choice, and the time in ms."""
        return cls(case=tuple(sorted(case.items())), choice=tuple(sorted(choice.items())), ms=ms)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """All measurements that answer one question about one op on one kind of device."""

    op: str
    question: str
    device_kind: str
    environment: tuple[tuple[str, str], ...]  # versions, clock, command: how to repeat it
    rows: tuple[Row, ...]

    def with_rows(self, rows: Iterable[Row]) -> "Table":
        """Returns a copy with new rows, which replace rows of the same case and choice."""
        merged = {(row.case, row.choice): row for row in (*self.rows, *rows)}
        return dataclasses.replace(self, rows=tuple(merged.values()))

    def best(self, case: dict[str, Value]) -> Row | None:
        """Returns the row of the fastest choice measured for exactly this case; None if none."""
        wanted = tuple(sorted(case.items()))
        rows = [row for row in self.rows if row.case == wanted]
        return min(rows, key=lambda row: row.ms, default=None)


def save(table: Table, path: pathlib.Path) -> None:
    """Writes a table as JSON with one row per line; equal tables give equal files."""
    head = {
        "schema": SCHEMA,
        "op": table.op,
        "question": table.question,
        "device_kind": table.device_kind,
        "environment": dict(sorted(table.environment)),
    }
    lines = sorted(
        json.dumps({"case": dict(row.case), "choice": dict(row.choice), "ms": row.ms})
        for row in table.rows
    )
    body = ",\n".join(f"    {line}" for line in lines)
    text = json.dumps(head, indent=2)[:-2] + f',\n  "rows": [\n{body}\n  ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def load(path: pathlib.Path) -> Table:
    """Reads a tuning table from a JSON file.

    Raises:
        TableError: the file is not JSON, or has other fields or types than ``save`` writes, or the
            same case and choice twice.
    """
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise TableError(f"{path} is not JSON: {error}; measure again or restore it") from error
    texts = ("op", "question", "device_kind")
    _expect(path, isinstance(document, dict), "is not an object")
    _expect(path, set(document) == {"schema", "environment", "rows", *texts}, "has other fields")
    _expect(path, document["schema"] == SCHEMA, f"has schema {document['schema']}, not {SCHEMA}")
    _expect(path, all(isinstance(document[name], str) for name in texts), "has a non-text name")
    _expect(path, _is_mapping(document["environment"], (str,)), "has a bad environment")
    _expect(path, isinstance(document["rows"], list), "has no list of rows")
    rows = []
    for i, row in enumerate(document["rows"]):
        fits = isinstance(row, dict) and set(row) == {"case", "choice", "ms"}
        _expect(path, fits, f"row {i} has other fields than case, choice, ms")
        plain = (str, int, float, bool, type(None))
        fits = _is_mapping(row["case"], plain) and _is_mapping(row["choice"], plain)
        _expect(path, fits, f"row {i} has a case or choice that is not of plain values")
        is_time = isinstance(row["ms"], (int, float)) and not isinstance(row["ms"], bool)
        _expect(path, is_time and row["ms"] > 0, f"row {i} has ms={row['ms']}")
        rows.append(Row.of(**row))
    keys = {(row.case, row.choice) for row in rows}
    _expect(path, len(keys) == len(rows), "measures a case and choice twice")
    return Table(
        op=document["op"],
        question=document["question"],
        device_kind=document["device_kind"],
        environment=tuple(sorted(document["environment"].items())),
        rows=tuple(rows),
    )


def find(folder: pathlib.Path, op: str, question: str) -> Table | None:
    """Returns the current device's tuning table: the packaged one, overlaid by the user's own.

    Args:
        folder: the op's ``tuned`` folder.
        op: the op's name.
        question: what the table answers, such as "forward" or "dispatch".
    """
    return _find(folder, op, question, device.target().slug, str(user_folder()))


def octaves_apart(case: dict[str, Value], wanted: dict[str, int]) -> dict[str, float]:
    """Returns by name the distance, in powers of two, of a measured case's sizes from a call's."""
    return {name: abs(math.log2(size / count(case[name]))) for name, size in wanted.items()}


def by_nearness(
    table: Table, same: dict[str, Value], sizes: dict[str, int], farthest: dict[str, float]
) -> list[tuple[float, list[Row]]]:
    """Returns the rows of measured cases near a call, grouped by case, the nearest case first.

    Each case is given with its distance from the call in powers of two.

    Args:
        same: fields, with their values, in which a case must equal the call.
        sizes: sizes of the call, by name.
        farthest: powers of two within which a measured size is trusted, by name.
    """
    found: dict[tuple, list[Row]] = {}
    for row in table.rows:
        case = dict(row.case)
        if any(case[name] != value for name, value in same.items()):
            continue
        apart = octaves_apart(case, sizes)
        if all(apart[name] <= most for name, most in farthest.items()):
            found.setdefault((sum(apart.values()), row.case), []).append(row)
    return [(key[0], found[key]) for key in sorted(found)]


def count(value: Value) -> int:
    """Returns a table's value as an int, after a check that it is a positive integer.

    Raises:
        TableError: the value is not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TableError(f"a measured case or choice has {value!r} for a size; measure again")
    return value


def config_of[C](kind: type[C], choice: dict[str, Value], where: str) -> C:
    """Returns a kernel's configuration made from the fields of a table row's choice.

    Args:
        kind: a dataclass of plain fields.
        where: text that names the row in error messages.

    Raises:
        TableError: a field that the kernel does not have, or of another type.
    """
    fields: Any = kind
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(fields)}
    for name, value in choice.items():
        fits = name in types and type(value) is types[name]
        if not fits or (type(value) is int and value < 1):
            known = ", ".join(f"{name}: {type.__name__}" for name, type in types.items())
            raise TableError(
                f"{where} has {name}={value!r}: {kind.__name__} has {known}; measure again, or "
                "delete it"
            )
    given: dict[str, Any] = dict(choice)
    return kind(**given)


def user_file(op: str, question: str) -> pathlib.Path:
    """Returns the path of the user's own tuning table for the current device."""
    return user_folder() / op / f"{question}-{device.target().slug}.json"


def user_folder() -> pathlib.Path:
    """Returns the folder in which the user's own tuning tables are kept."""
    named = os.environ.get(USER_FOLDER_VARIABLE)
    if named:
        return pathlib.Path(named)
    return (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pallas_kernels"
    )


@functools.cache
def _find(
    folder: pathlib.Path, op: str, question: str, slug: str, user_folder: str
) -> Table | None:
    name = f"{question}-{slug}.json"
    places = [folder / name, pathlib.Path(user_folder) / op / name]
    found = None
    for place in places:
        if place.exists():
            table = load(place)
            agrees = (table.op, table.question) == (op, question)
            _expect(place, agrees, f"answers {table.question} of {table.op}")
            found = table if found is None else found.with_rows(table.rows)
    return found


def _is_mapping(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kinds) for item in value.values())


def _expect(path: pathlib.Path, true: bool, otherwise: str) -> None:
    if not true:
        raise TableError(f"{path} {otherwise}; measure again or restore it")
