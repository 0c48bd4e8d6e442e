"""What went wrong in a run and what was done: ``incidents.jsonl``, one line each.

Kept over resumptions and roll-backs. Batches that were taken out of the order since the newest
checkpoint are read from here, so that a resumed run leaves them out again; a checkpoint has those
of before.
"""

import json
import os
import time
from pathlib import Path
from typing import Any, TypedDict

from jaxinfra.runtime.json_lines import drop_cut_line, read_log

EXCLUDED = "batch excluded"
RECOMPILED = "recompiled"  # a batch came in another shape


def record_incident(file: Path, kind: str, *, step: int, text: str, **details: Any) -> None:
    """Appends a line and forces it to the disk: what it says must survive what follows."""
    line = {"kind": kind, "step": step, "text": text, "time": time.time(), **details}
    drop_cut_line(file)  # of a session that was killed
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_incidents(file: Path) -> list[dict[str, Any]]:
    """All incidents of a run, oldest first; damaged lines are left out."""
    lines, _ = read_log(file, holds=_Incident)
    return lines


def excluded_steps(file: Path) -> set[int]:
    """Steps whose batches were taken out of the order."""
    return {line["step"] for line in read_incidents(file) if line["kind"] == EXCLUDED}


class _Incident(TypedDict):
    kind: str
    step: int
    text: str
