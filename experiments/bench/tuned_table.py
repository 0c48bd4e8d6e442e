"""Measured rows into a table under ``tuned/``, which "auto" follows."""

import pathlib
from collections.abc import Collection, Iterable

from experiments.bench.environment import environment
from pallas_kernels.common import device, tables


def add_rows(
    folder: pathlib.Path,
    rows: Iterable[tables.Row],
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
    older: list[tables.Row] = []
    if path.exists():
        before = tables.load(path)
        older = [row for row in before.rows if row.case not in without]
        if older:
            commands = dict(before.environment)["command"].split(" && ")
            told["command"] = " && ".join(dict.fromkeys([*commands, told["command"]]))
    fresh = tables.Table(
        op=op,
        question=question,
        device_kind=facts.kind,
        environment=tuple(
            (name, str(told[name])) for name in ("clocks", "command", "date", "jax", "jaxlib")
        ),
        rows=(),
    )
    tables.save(fresh.with_rows([*older, *rows]), path)
