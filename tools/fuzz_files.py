"""Checks of the files that a command of a fuzzed case leaves behind."""

import hashlib
from pathlib import Path


def sums(place: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, by its path there."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def is_set_aside(name: str, before: dict[str, str], after: dict[str, str]) -> bool:
    """Whether a checkpoint's file is unchanged in the quarantine: its step was saved again."""
    checkpoints, _, rest = name.partition("/step_")
    step, _, file = rest.partition("/")
    return any(
        other.startswith(f"{checkpoints}/quarantine/step_{step}-")
        and other.endswith(f"/{file}")
        and digest == before[name]
        for other, digest in after.items()
    )
