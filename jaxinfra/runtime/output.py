"""Shows what processes write to files, as they write it."""

from pathlib import Path
from typing import TextIO, final


@final
class Tail:
    """Copies whole lines of a growing file to a stream."""

    def __init__(self, file: Path, stream: TextIO, *, prefix: str):
        self._file, self._stream, self._prefix = file, stream, prefix
        self._at = 0

    def show(self) -> None:
        """What is new since the last call."""
        with self._file.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        end = data.rfind(b"\n") + 1
        if not end:
            return
        self._at += end
        for line in data[:end].decode(errors="replace").splitlines():
            self._stream.write(f"{self._prefix}{line}\n")
        self._stream.flush()


def last_line(file: Path) -> str:
    """The last line that says something; empty where there is none."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
