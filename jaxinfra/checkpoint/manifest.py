"""The manifest: SHA-256 and size of every file of a checkpoint, checked before anything is loaded.

Orbax loads a checkpoint with a flipped bit without an error, so we keep our own sums.

What it detects: any change to the bytes of any file between the moment the sums were taken and the
moment they are checked (flipped bits, truncation, missing or extra files, a renamed checkpoint),
the manifest's own bytes included.

What it cannot detect: damage older than the sums. They are computed from the files right after
they were written, so whatever went into those files, a bit flipped in device or host memory or in
the writer, is taken for the truth. Both sums usually come from the operating system's page cache:
damage on the disk itself shows only once the cache no longer holds the file, as after a restart on
another machine. The sums guard against accidents, not against a person who recomputes them.
"""

import concurrent.futures
import dataclasses
import enum
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, TypedDict

from jaxinfra.checkpoint import directory_layout
from jaxinfra.errors import CheckpointError
from jaxinfra.runtime.files import JSON_BYTES, parse_json, require_type

_FORMAT = 1
# One thread hashes about 1.6 GB/s on a core with SHA instructions; 1-4 MiB blocks are fastest.
_BLOCK_BYTES = 4 << 20
MAX_THREADS = 16


class FileFault(enum.StrEnum):
    """What can be wrong with one file of a checkpoint."""

    MISSING = "missing"
    EXTRA = "extra"
    SIZE = "size"
    CONTENT = "content"
    UNREADABLE = "unreadable"
    MANIFEST = "manifest"  # the manifest itself is damaged: nothing can be vouched for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One reason why a checkpoint cannot be trusted."""

    file: str  # relative to the checkpoint's directory
    fault: FileFault
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}: {self.detail}"


def write(checkpoint: Path, *, step: int) -> None:
    """Forces every file to the disk, then writes the manifest of the files as they are there."""
    names = sorted(_files(checkpoint))
    with concurrent.futures.ThreadPoolExecutor(MAX_THREADS) as pool:
        sums = pool.map(lambda name: _sha256(checkpoint / name, sync=True), names)
        files = {
            name: {"size": size, "sha256": digest}
            for name, (size, digest) in zip(names, sums, strict=True)
        }
    path = checkpoint / directory_layout.MANIFEST
    path.write_bytes(_encode({"format": _FORMAT, "step": step, "files": files}))
    directory_layout.sync(path)
    for directory, _, _ in os.walk(checkpoint):
        directory_layout.sync(Path(directory))


def verify(directory: Path, step: int) -> list[Problem]:
    """Compares every file of a checkpoint with its manifest; empty when all is as written.

    Reads, and changes nothing. Sizes are compared first, so a truncated checkpoint is found without
    reading the rest of it.
    """
    checkpoint = directory / directory_layout.step_name(step)
    try:
        actual = _files(checkpoint)
        size = actual.get(directory_layout.MANIFEST, 0)
        if size == -1:
            raise ValueError("it is no plain file")
        if size > JSON_BYTES:
            raise ValueError(f"{size:,} bytes")
        expected = _decode((checkpoint / directory_layout.MANIFEST).read_bytes(), step=step)
    except OSError as error:
        return [_of_manifest(FileFault.UNREADABLE, _reason(error))]
    except (ValueError, CheckpointError) as error:
        return [_of_manifest(FileFault.MANIFEST, str(error))]
    problems = [
        Problem(file=name, fault=FileFault.MISSING, detail="listed in the manifest, not there")
        for name in sorted(expected.keys() - actual.keys())
    ]
    problems += [
        Problem(file=name, fault=FileFault.EXTRA, detail="there, but not listed in the manifest")
        for name in sorted(actual.keys() - expected.keys() - {directory_layout.MANIFEST})
    ]
    common = sorted(expected.keys() & actual.keys())
    problems += [
        Problem(
            file=name,
            fault=FileFault.SIZE,
            detail=f"{actual[name]} bytes, written with {expected[name]['size']}",
        )
        for name in common
        if actual[name] != expected[name]["size"]
    ]
    if problems:
        return problems
    with concurrent.futures.ThreadPoolExecutor(MAX_THREADS) as pool:
        found = pool.map(lambda name: _check(checkpoint, name, expected[name]["sha256"]), common)
        return [problem for problem in found if problem is not None]


def _of_manifest(fault: FileFault, detail: str) -> Problem:
    return Problem(file=directory_layout.MANIFEST, fault=fault, detail=detail)


def _check(checkpoint: Path, name: str, expected: str) -> Problem | None:
    try:
        digest = sha256(checkpoint / name)
    except OSError as error:
        return Problem(file=name, fault=FileFault.UNREADABLE, detail=_reason(error))
    if digest == expected:
        return None
    detail = f"SHA-256 {digest[:16]}…, written with {expected[:16]}…"
    return Problem(file=name, fault=FileFault.CONTENT, detail=detail)


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
    """SHA-256 of a file, in hexadecimal."""
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
