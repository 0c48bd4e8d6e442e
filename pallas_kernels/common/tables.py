"""Tuning tables: measured times of an op's alternatives, in JSON files.

A row gives the milliseconds that one choice (an implementation or tile sizes) took in one case
(shapes, dtype). The benchmarks write the files to an op's ``tuned`` folder, one per kind of device
and question, such as "dispatch".
"""

import dataclasses
import functools
import json
import math
import pathlib

from . import device

type Value = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement of a tuning table: the time of a choice (such as tiles) in a case."""

    case: tuple[tuple[str, Value], ...]  # sorted by name
    choice: tuple[tuple[str, Value], ...]
    ms: float

    @classmethod
    def of(cls, *, case: dict[str, Value], choice: dict[str, Value], ms: float) -> "Row":
        """Makes a table's row from plain dicts of a case and a choice, and the time in ms."""
        return cls(case=tuple(sorted(case.items())), choice=tuple(sorted(choice.items())), ms=ms)


@functools.cache
def read(path: pathlib.Path) -> tuple[Row, ...]:
    """Returns the rows of a tuning table's JSON file; () where there is no such file."""
    if not path.exists():
        return ()
    return tuple(Row.of(**row) for row in json.loads(path.read_text())["rows"])


def find(folder: pathlib.Path, question: str) -> tuple[Row, ...]:
    """Returns the rows of the current device's tuning table; () where none was measured.

    Args:
        folder: the op's ``tuned`` folder.
        question: what the table answers, such as "dispatch".
    """
    return read(folder / f"{question}-{device.target().slug}.json")


def by_nearness(
    rows: tuple[Row, ...], same: dict[str, Value], sizes: dict[str, int], farthest: dict[str, float]
) -> list[tuple[float, list[Row]]]:
    """Returns the rows of measured cases near a call, grouped by case, the nearest case first.

    Each case comes with its distance from the call: the sum over ``sizes`` of ``|log2(ratio)|``.

    Args:
        same: fields, with their values, in which a case must equal the call.
        sizes: sizes of the call, by name.
        farthest: largest ``|log2(ratio)|`` of a size at which a measurement still counts, by name.
    """
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        case = dict(row.case)
        if any(case[name] != value for name, value in same.items()):
            continue
        apart = {n: abs(math.log2(size / float(case[n] or 1))) for n, size in sizes.items()}
        if all(apart[name] <= most for name, most in farthest.items()):
            found.setdefault((sum(apart.values()), row.case), []).append(row)
    return [(key[0], found[key]) for key in sorted(found)]
