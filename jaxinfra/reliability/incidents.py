"""What went wrong in a run and what was done: ``incidents.jsonl``, one line each.

Kept over resumptions and roll-backs. Batches that were taken out of the order are read from here,
so that a resumed run leaves them out again.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from jaxinfra.core.errors import CheckpointError

EXCLUDED = "batch excluded"


def record_incident(file: Path, kind: str, *, step: int, text: str, **details: Any) -> None:
    """Appends a line and forces it to the disk: what it says must survive what follows."""
    line = {"kind": kind, "step": step, "text": text, "time": time.time(), **details}
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_incidents(file: Path) -> list[dict[str, Any]]:
    """All incidents of a run; a last line cut short by a kill is left out."""
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


def excluded_steps(file: Path) -> set[int]:
    """Steps whose batches were taken out of the order."""
    return {found["step"] for found in read_incidents(file) if found["kind"] == EXCLUDED}
