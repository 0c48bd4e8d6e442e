"""Measured rows into a table under ``tuned/``, which "auto" follows."""

import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterable

from experiments.bench.environment import environment
from pallas_kernels.common import device
from pallas_kernels.common.tables import Row


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """All measurements that answer one question about one op on one kind of device."""

    op: str
    question: str
    device_kind: str
    environment: dict[str, str]  # versions, clock, command: how to repeat it
    rows: tuple[Row, ...]

    def with_rows(self, rows: Iterable[Row]) -> "Table":
        """Returns a copy with new rows, which replace rows of the same case and choice."""
        merged = {(row.case, row.choice): row for row in (*self.rows, *rows)}
        return dataclasses.replace(self, rows=tuple(merged.values()))


def save(table: Table, path: pathlib.Path) -> None:
    """Writes a table as JSON with one row per line; equal tables give equal files."""
    head = {
        "schema": 1,
        "op": table.op,
        "question": table.question,
        "device_kind": table.device_kind,
        "environment": dict(sorted(table.environment.items())),
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
    """Reads what ``save`` wrote."""
    document = json.loads(path.read_text())
    assert document.pop("schema") == 1, path
    rows = tuple(Row.of(**row) for row in document.pop("rows"))
    return Table(**document, rows=rows)


def add_rows(
    folder: pathlib.Path,
    rows: Iterable[Row],
    *,
    op: str,
    question: str,
    without: Collection[tuple] = (),
) -> None:
    """Writes this device's table with these rows and those that it has; its command names both.

    Args:
        without: cases of which no older row stays.
    """
    facts = device.target()
    path = folder / f"{question}-{facts.slug}.json"
    told = environment()
    told |= told.pop("versions")
    older: list[Row] = []
    if path.exists():
        before = load(path)
        older = [row for row in before.rows if row.case not in without]
        if older:
            commands = before.environment["command"].split(" && ")
            told["command"] = " && ".join(dict.fromkeys([*commands, told["command"]]))
    fresh = Table(
        op=op,
        question=question,
        device_kind=facts.kind,
        environment={
            name: str(told[name]) for name in ("clocks", "command", "date", "jax", "jaxlib")
        },
        rows=(),
    )
    save(fresh.with_rows([*older, *rows]), path)
