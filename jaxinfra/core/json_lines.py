"""Files of one JSON object a line, whose writer may be killed in the middle of a line."""

import json
from pathlib import Path
from typing import Any

from jaxinfra.core.errors import CheckpointError


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """All lines of a file; none where there is no file. A last line that was cut short is left out.

    Raises CheckpointError where another line is not JSON: something else than a kill has spoilt it.
    """
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(
                f"{file}, line {number} is not JSON ({error}); repair or remove that line"
            ) from error
    return found


def drop_cut_line(file: Path) -> None:
    """Cuts off what follows the last line break, so that the next line begins on its own."""
    if not file.exists():
        return
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with file.open("r+b") as opened:
            opened.truncate(end)
