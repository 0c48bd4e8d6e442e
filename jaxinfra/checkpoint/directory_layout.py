"""The layout of a ``checkpoints/`` directory. Every state a crash can leave has its own name.

    step_00000100/                   committed: complete when it got this name, by one rename
    step_00000100.partial-<unique>/  being written, or left by a killed save
    step_00000100.deleted-<unique>/  being deleted, or left by a killed deletion
    quarantine/                      found damaged or set aside, with a reason file beside each
    .lock                            held by the one process that may change the directory

Each checkpoint has a manifest: SHA-256 and size of every file, checked before anything is
loaded. Orbax loads a checkpoint with a flipped bit without an error, so we keep our own sums.

The sums detect any change to the bytes of any file after they were taken: flipped bits,
truncation, missing or extra files, a renamed checkpoint. The manifest's own bytes are included.

The sums cannot detect earlier damage. They are computed right after the files were written, so a
bit that was flipped before, in memory or by the writer, is part of the sum. A check soon after the
write usually reads the operating system's page cache. It finds damage on the disk itself only when
the file is no longer cached, as after a restart on another machine. The sums guard against
accidents, not against a person who recomputes them.
"""

import concurrent.futures
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict

from jaxinfra.config.run import CheckpointConfig
from jaxinfra.errors import CheckpointError
from jaxinfra.runtime.files import JSON_BYTES, parse_json, require_type

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
    """Returns the directory name of a committed step, such as ``step_00000100``."""
    return f"step_{step:08d}"


def steps(directory: Path) -> list[int]:
    """Returns a directory's committed steps, ascending, whether or not their files are intact."""
    if not directory.is_dir():
        return []
    matches = (_COMMITTED.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    found = (int(match[1]) for match in matches if match)
    return sorted(step for step in found if (directory / step_name(step)).is_dir())


def sync(path: Path) -> None:
    """Forces a file's bytes, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(directory: Path) -> IO[str]:
    """Locks the directory for this process until it ends or closes the returned file.

    Without the lock two writers, such as a hung trainer and its replacement, would delete each
    other's files. It is a record lock and not flock(): it ends with this process, even if forked
    data workers survive.
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
    """Deletes the remains of killed saves and deletions and returns their names. Needs the lock."""
    names = sorted(path.name for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))
    for name in names:
        _log.warning("%s: removing %s, left by a save or deletion that died", directory, name)
        _delete(directory / name)
    return names


def commit(partial: Path, final: Path) -> None:
    """Renames a partial checkpoint to its committed name, in one step that survives a power cut."""
    partial.rename(final)  # refuses if `final` exists: it is never empty
    sync(final.parent)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A checkpoint that was not read, with the reasons."""

    step: int
    path: Path  # in quarantine, or where it was if it could not or should not be moved
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.reasons[:3])
        more = f"; and {len(self.reasons) - 3} more" if len(self.reasons) > 3 else ""
        return f"step {self.step} ({shown}{more})"


def set_aside(directory: Path, step: int, reasons: Sequence[str]) -> Rejected:
    """Moves a step's checkpoint into quarantine, with a JSON file of reasons; deletes nothing."""
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
    """Returns the steps to keep: the newest, and those of lowest held-out loss (ties: newer)."""
    newest = sorted(losses)[-config.keep_last :]
    ranked = sorted(
        (loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)
    )
    return {*newest, *(-negated for _, negated in ranked[: config.keep_best])}


def delete(directory: Path, step: int) -> None:
    """Deletes a committed step; if killed half-way, the remains no longer count as a checkpoint."""
    doomed = directory / f"{step_name(step)}.deleted-{secrets.token_hex(4)}"
    try:
        (directory / step_name(step)).rename(doomed)
    except OSError as error:
        _log.warning("step %d in %s could not be deleted: %s", step, directory, error)
        return
    _delete(doomed)


def discard(partial: Path) -> None:
    """Removes the partial directory of a failed save, so that a full disk regains its space."""
    # The first failed write ends a save; other writes go on for a moment, and make directories.
    for _ in range(_DISCARD_ATTEMPTS):
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(_DISCARD_PAUSE_S)
        if not partial.exists():
            return
    _log.warning("could not delete %s; the next save tries again", partial)


def _delete(path: Path) -> None:
    # A failure is not worth failing a save for: the name already says that it is no checkpoint.
    shutil.rmtree(path, onexc=lambda _, at, why: _log.warning("could not delete %s: %s", at, why))


_FORMAT = 1
# One thread hashes about 1.6 GB/s on a core with SHA instructions; 1-4 MiB blocks are fastest.
_BLOCK_BYTES = 4 << 20
MAX_THREADS = 16


def write_manifest(checkpoint: Path, *, step: int) -> None:
    """Forces a checkpoint's files to disk, then writes a manifest of sizes and SHA-256 sums."""
    names = sorted(_files(checkpoint))
    with concurrent.futures.ThreadPoolExecutor(MAX_THREADS) as pool:
        sums = pool.map(lambda name: _sha256(checkpoint / name, sync=True), names)
        files = {
            name: {"size": size, "sha256": digest}
            for name, (size, digest) in zip(names, sums, strict=True)
        }
    path = checkpoint / MANIFEST
    path.write_bytes(_encode({"format": _FORMAT, "step": step, "files": files}))
    sync(path)
    for directory, _, _ in os.walk(checkpoint):
        sync(Path(directory))


def verify(directory: Path, step: int) -> list[str]:
    """Compares every file of a checkpoint with its manifest; returns what is wrong with which file,
    nothing if all match.

    It changes nothing. Sizes are compared first, as a truncated file is found without reading.
    """
    checkpoint = directory / step_name(step)
    try:
        actual = _files(checkpoint)
        size = actual.get(MANIFEST, 0)
        if size == -1:
            raise ValueError("it is no plain file")
        if size > JSON_BYTES:
            raise ValueError(f"{size:,} bytes")
        expected = _decode((checkpoint / MANIFEST).read_bytes(), step=step)
    except OSError as error:
        return [f"{MANIFEST}: unreadable: {_reason(error)}"]
    except (ValueError, CheckpointError) as error:
        return [f"{MANIFEST}: manifest: {error}"]  # nothing can be vouched for
    problems = [
        f"{name}: missing: listed in the manifest, not there"
        for name in sorted(expected.keys() - actual.keys())
    ]
    problems += [
        f"{name}: extra: there, but not listed in the manifest"
        for name in sorted(actual.keys() - expected.keys() - {MANIFEST})
    ]
    common = sorted(expected.keys() & actual.keys())
    problems += [
        f"{name}: size: {actual[name]} bytes, written with {expected[name]['size']}"
        for name in common
        if actual[name] != expected[name]["size"]
    ]
    if problems:
        return problems
    with concurrent.futures.ThreadPoolExecutor(MAX_THREADS) as pool:
        found = pool.map(lambda name: _check(checkpoint / name, expected[name]["sha256"]), common)
        return [f"{name}: {each}" for name, each in zip(common, found, strict=True) if each]


def _check(file: Path, expected: str) -> str:
    try:
        digest = sha256(file)
    except OSError as error:
        return f"unreadable: {_reason(error)}"
    if digest == expected:
        return ""
    return f"content: SHA-256 {digest[:16]}…, written with {expected[:16]}…"


def _files(checkpoint: Path) -> dict[str, int]:
    """Sizes of all files below a checkpoint, by relative path; -1 for what is no plain file."""
    sizes = {}
    for parent, folders, names in os.walk(checkpoint, onerror=_raise):
        for name in names + [folder for folder in folders if (Path(parent) / folder).is_symlink()]:
            path = Path(parent) / name
            info = path.lstat()
            size = info.st_size if stat.S_ISREG(info.st_mode) else -1
            sizes[path.relative_to(checkpoint).as_posix()] = size
    return sizes


def _raise(error: OSError) -> None:
    raise error  # os.walk would skip a directory that it cannot list


def sha256(path: Path) -> str:
    """Computes the SHA-256 of a file, in hexadecimal."""
    return _sha256(path, sync=False)[1]


def _sha256(path: Path, *, sync: bool) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, digest.hexdigest()


def _encode(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True)
    return json.dumps(body | {"checksum": _checksum(text)}, sort_keys=True, indent=1).encode()


def _decode(data: bytes, *, step: int) -> dict[str, dict[str, Any]]:
    """The files listed in a manifest; raises ValueError unless every byte is as written."""
    body = parse_json(data, where="it", error=CheckpointError)
    checksum = body.pop("checksum", None)
    # Comparing the bytes too: a flip may turn one white space into another, and change no value.
    if checksum != _checksum(json.dumps(body, sort_keys=True)) or data != _encode(body):
        raise ValueError("its own checksum does not match")
    if body.get("format") != _FORMAT:
        raise ValueError(
            f"format {body.get('format')!r} is not {_FORMAT}, the one this version reads"
        )
    require_type(body, _Manifest, where="it", error=CheckpointError)
    if body["step"] != step:
        raise ValueError(f"it belongs to step {body['step']}: the directory was renamed")
    return body["files"]


class _File(TypedDict):
    size: int
    sha256: str


class _Manifest(TypedDict):
    step: int
    files: dict[str, _File]


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
