"""Files of one JSON object a line, whose writer may be killed in the middle of a line."""

from pathlib import Path
from typing import Any

from jaxinfra.errors import CheckpointError, ConfigError
from jaxinfra.runtime.files import parse_json, read_bytes

LINES_BYTES = 4 << 30
"""Largest file of lines read: ten million steps have a tenth of it."""


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """All lines of a file; none where there is no file. A last line that was cut short is left out.

    Raises CheckpointError where another line is no JSON object: something else than a kill has
    spoilt it.
    """
    lines = _lines(file)
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(parse_json(line, where=f"{file}, line {number}", error=CheckpointError))
        except CheckpointError as error:
            if number == len(lines):
                break
            raise CheckpointError(f"{error}, or remove that line") from error
    return found


def read_log(file: Path, *, holds: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines of a log that are objects of type ``holds``, and the numbers of damaged ones.

    For what only tells what happened: a damaged line of it is no reason to stop anything.
    """
    found, damaged = [], []
    for number, line in enumerate(_lines(file), start=1):
        try:
            found.append(parse_json(line, where=str(file), holds=holds))
        except ConfigError:
            if line.endswith(b"\n"):  # else a kill has cut it short
                damaged.append(number)
    return found, damaged


def _lines(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    return read_bytes(file, limit=LINES_BYTES, error=CheckpointError).splitlines(keepends=True)


def drop_cut_line(file: Path) -> None:
    """Cuts off what follows the last line break, so that the next line begins on its own."""
    if not file.exists():
        return
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with file.open("r+b") as opened:
            opened.truncate(end)
