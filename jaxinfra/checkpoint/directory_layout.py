"""Names and moves in a ``checkpoints/`` directory. Every state a crash can leave has its own name.

step_00000100/                   committed: complete when it got this name, by one rename
step_00000100.partial-<unique>/  being written, or left by a killed save
step_00000100.deleted-<unique>/  being deleted, or left by a killed deletion
quarantine/                      found damaged or set aside, with a reason file beside each
.lock                            held by the one process that may change the directory
"""

import dataclasses
import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError

ARRAYS = "arrays"
METADATA = "metadata.json"
MANIFEST = "manifest.json"
QUARANTINE = "quarantine"

_LOCK = ".lock"
_DISCARD_ATTEMPTS = 40
_DISCARD_PAUSE_S = 0.05
_COMMITTED = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"step_\d{8,}\.(partial|deleted)-\w+")

_log = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """The directory name of a committed step, such as ``step_00000100``."""
    return f"step_{step:08d}"


def steps(directory: Path) -> list[int]:
    """Committed steps, ascending; whether their files are intact is another question."""
    if not directory.is_dir():
        return []
    matches = (_COMMITTED.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    found = (int(match[1]) for match in matches if match)
    return sorted(step for step in found if (directory / step_name(step)).is_dir())


def sync(path: Path) -> None:
    """Forces a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(directory: Path) -> IO[str]:
    """Claims the directory for this process until it ends or closes what is returned.

    Two writers would delete each other's files: an old trainer that hangs, and its replacement.
    A record lock and not flock(): it dies with this process, even if forked data workers survive.
    """
    path = directory / _LOCK
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise CheckpointError(f"{path} is no plain file, so it is no lock of ours; remove it")
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            _log.warning("%s: this file system has no locks (%s)", directory, error.strerror)
            return file
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise CheckpointError(
            f"{directory} is in use by another writer ({holder}); one process writes to it. Stop "
            "the other run, or choose another run directory; reading needs no lock"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def sweep(directory: Path) -> list[str]:
    """Deletes what killed saves and deletions left; returns the names. Needs the lock."""
    names = sorted(path.name for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))
    for name in names:
        _log.warning("%s: removing %s, left by a save or deletion that died", directory, name)
        _delete(directory / name)
    return names


def commit(partial: Path, final: Path) -> None:
    """Makes a partial checkpoint a committed one, in one step that survives a power cut."""
    partial.rename(final)  # refuses if `final` exists: it is never empty
    sync(final.parent)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A checkpoint that was not used, and why."""

    step: int
    path: Path  # in quarantine, or where it was if it could not or should not be moved
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.reasons[:3])
        more = f"; and {len(self.reasons) - 3} more" if len(self.reasons) > 3 else ""
        return f"step {self.step} ({shown}{more})"


def set_aside(directory: Path, step: int, reasons: Sequence[str]) -> Rejected:
    """Moves a step into quarantine, a JSON file with the reasons beside it. Deletes nothing."""
    name = f"{step_name(step)}-{secrets.token_hex(4)}"
    source, target = directory / step_name(step), directory / QUARANTINE / name
    rejected = Rejected(step=step, path=target, reasons=tuple(reasons))
    try:
        target.parent.mkdir(exist_ok=True)
        source.rename(target)
    except OSError as error:
        _log.warning("%s is not used but could not be moved: %s", source, error)
        rejected = dataclasses.replace(rejected, path=source)
    else:
        note = {"step": step, "moved_from": source.name, "reasons": list(reasons)}
        try:
            target.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n")
        except OSError as error:  # such as a full disk: the log holds the reasons too
            _log.warning("%s: no reason file: %s", target, error)
    _log.warning("checkpoint set aside: %s, now in %s", rejected, rejected.path)
    return rejected


def retained(losses: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Which steps to keep: the newest, and those of lowest held-out loss (the newer of equals)."""
    newest = sorted(losses)[-config.keep_last :]
    ranked = sorted(
        (loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)
    )
    return {*newest, *(-negated for _, negated in ranked[: config.keep_best])}


def delete(directory: Path, step: int) -> None:
    """Deletes a committed step; killed half-way, it is no longer taken for a checkpoint."""
    doomed = directory / f"{step_name(step)}.deleted-{secrets.token_hex(4)}"
    try:
        (directory / step_name(step)).rename(doomed)
    except OSError as error:
        _log.warning("step %d in %s could not be deleted: %s", step, directory, error)
        return
    _delete(doomed)


def discard(partial: Path) -> None:
    """Removes a save that failed, so that a full disk gets its space back."""
    # The first failed write ends a save; other writes go on for a moment, and make directories.
    for _ in range(_DISCARD_ATTEMPTS):
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(_DISCARD_PAUSE_S)
        if not partial.exists():
            return
    _log.warning("could not delete %s; the next save tries again", partial)


def _delete(path: Path) -> None:
    shutil.rmtree(path, onexc=_could_not_delete)


def _could_not_delete(_: object, path: str, error: BaseException) -> None:
    # Not worth failing a save for: the name already says that it is no checkpoint.
    _log.warning("could not delete %s: %s", path, error)
