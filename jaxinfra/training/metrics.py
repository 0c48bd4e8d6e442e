"""What a run records: ``metrics.jsonl``, TensorBoard events and the loss picture."""

import json
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

from jaxinfra.core.errors import CheckpointError


class MetricsLog:
    """Appends one JSON line a record, flushed at once, and the same values as TensorBoard events.

    Args:
        after_step: a resumed run repeats what came after this step, so later lines are dropped.
    """

    def __init__(self, file: Path, tensorboard: Path, *, after_step: int):
        kept = [record for record in read_metrics(file) if record["step"] <= after_step]
        self.records = kept
        text = "".join(json.dumps(record) + "\n" for record in kept)
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text)
        partial.rename(file)
        self._file = file.open("a")
        self._events = SummaryWriter(str(tensorboard), purge_step=after_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record; it must have a ``step``."""
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Closes both logs."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All records of a run; a last line cut short by a kill is dropped."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(
                f"{file}, line {number} is not JSON ({error}); repair or remove that line"
            ) from error
    return records
