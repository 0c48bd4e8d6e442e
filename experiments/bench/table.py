"""Rows of a benchmark as they come, kept on disk."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence

from experiments.bench.environment import environment


@dataclasses.dataclass
class Table:
    """Written after every row, so that an interrupted benchmark leaves what it has."""

    out: pathlib.Path | None
    deadline: float  # on the clock of time.monotonic()
    only: Sequence[str] = ("",)  # prefixes of the names of rows to measure
    rows: list[dict] = dataclasses.field(default_factory=list)

    def add(self, name: str, measure: Callable[[], dict]) -> dict:
        """Runs one variant; its failure is a row too, and so is its coming too late."""
        if not name.startswith(tuple(self.only)):
            return {"skipped": "not asked for"}
        start = time.monotonic()
        if start > self.deadline:
            row = {"skipped": "out of time"}
        else:
            try:
                row = measure()
            except Exception as error:  # one variant's failure must not end the table
                row = {"failed": repr(error)[:300]}
        self.rows.append({"name": name, **row})
        print(json.dumps(self.rows[-1]), f"{time.monotonic() - start:.1f} s", flush=True)
        if self.out:
            document = {**environment(), "rows": self.rows}
            self.out.write_text(json.dumps(document, indent=1) + "\n")
        return row
