"""Compiled programs of engines on disk, so that a second start neither traces nor compiles them.

A program's file is named by a hash of all that it was compiled from and for. It holds a SHA-256
checksum and the serialized executable, and is written whole or not at all.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import pickle
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import jax
from jax.experimental import serialize_executable

from jaxinfra.runtime.files import user_cache

LIMIT_BYTES = 4 << 30
"""Default size of a store; above it, the files that were used longest ago are deleted."""

_PACKAGES = ("jaxinfra", "pallas_kernels")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_TRACED_FILES = (".py", ".json")  # code, and tables of measured tiles
_INDIFFERENT = ("compilation_cache", "persistent_cache", "log", "traceback", "explain", "dump")
# Mosaic GPU writes paths into the environment as it is imported, between a name and the next.
_FLAGS = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
# Addresses differ between processes, and an absent device does not name its only kind of memory.
_ACCIDENTAL = re.compile(r" at 0x[0-9a-f]+|, memory_kind=device(?=\))")
_CHECKSUM_BYTES = 32
_PARTIAL = ".partial"

_log = logging.getLogger(__name__)


@final
class ProgramStore:
    """A directory of compiled programs that several processes and hosts may share.

    Program files are loaded as code, so only trusted users may write to the directory.

    Args:
        limit_bytes: size of the directory, above which least recently used files are deleted.
    """

    def __init__(self, directory: Path, *, limit_bytes: int = LIMIT_BYTES):
        self._directory = directory
        self._limit = limit_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("no compiled program is kept: %s cannot be made (%s)", directory, error)

    @classmethod
    def of_user(cls) -> "ProgramStore":
        """Returns the store in the user's cache directory."""
        return cls(user_cache() / "programs")

    def load(self, name: str, in_tree: Any, devices: Sequence[jax.Device]) -> Any:
        """Returns the compiled program ``name``, or None if it is not stored or is damaged.

        Args:
            in_tree: structure of the program's positional and keyword arguments.
            devices: devices that run the program, in the order of their mesh.
        """
        data = self._read(name)
        if data is None:
            return None
        _find_runtime(devices[0].platform)
        try:
            serialized, out_tree = pickle.loads(data)
            return serialize_executable.deserialize_and_load(
                serialized,
                in_tree,
                out_tree,
                backend=devices[0].client,
                execution_devices=devices,
            )
        except Exception as error:  # of whatever kind: it can be compiled again
            _log.warning("%s cannot be loaded, and is compiled again (%s)", self._file(name), error)
            return None

    def keep(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Writes a compiled program; logs a warning if it cannot be serialized or written."""
        try:
            serialized, _, out_tree = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            _log.warning("a compiled program is not kept: it cannot be serialized (%s)", error)
            return
        self._write(name, pickle.dumps((serialized, out_tree)))

    def recall(self, name: str) -> Any:
        """Returns the JSON value that ``note`` wrote under this name, or None."""
        data = self._read(name)
        return None if data is None else json.loads(data)

    def note(self, name: str, value: Any) -> None:
        """Writes a small JSON value, such as a program's measured memory, under a name."""
        self._write(name, json.dumps(value).encode())

    def _file(self, name: str) -> Path:
        return self._directory / name

    def _read(self, name: str) -> bytes | None:
        file = self._file(name)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s cannot be read (%s)", file, error)
            return None
        body = data[_CHECKSUM_BYTES:]
        if hashlib.sha256(body).digest() != data[:_CHECKSUM_BYTES]:
            _log.warning("%s is damaged, and is compiled again", file)
            return None
        try:
            os.utime(file)  # the time of its last use
        except OSError as error:
            _log.debug("%s: its time of use cannot be set (%s)", file, error)
        return body

    def _write(self, name: str, body: bytes) -> None:
        file = self._file(name)
        partial = file.with_name(f"{name}.{secrets.token_hex(4)}{_PARTIAL}")
        try:
            partial.write_bytes(hashlib.sha256(body).digest() + body)
            partial.replace(file)
            self._drop_oldest()
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            _log.warning("%s cannot be written, so it is compiled again (%s)", file, error)

    def _drop_oldest(self) -> None:
        found = []
        for entry in os.scandir(self._directory):
            try:
                found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            except FileNotFoundError:
                continue  # another process has just renamed or deleted it
        kept = 0
        for _, size, path in sorted(found, reverse=True):
            kept += size
            if kept > self._limit:
                Path(path).unlink(missing_ok=True)


@final
class Noted:
    """A number of a store that programs depend on.

    Args:
        store: None: nothing is noted.
        devices: devices of the programs.
        parts: what the number is of.
    """

    def __init__(self, store: ProgramStore | None, devices: Sequence[jax.Device], *parts: object):
        self._store = store
        self._name = "" if store is None else program_name(devices, *parts)

    @property
    def value(self) -> int | None:
        """The number; None if there is none."""
        return None if self._store is None else self._store.recall(self._name)

    def note(self, value: int) -> None:
        """Writes the number for later starts."""
        if self._store is not None:
            self._store.note(self._name, value)


@functools.cache
def _find_runtime(platform: str) -> None:
    """Lets XLA find the libraries that stored programs call; tracing such a call does it, too."""
    if platform == "gpu":  # Mosaic kernels
        importlib.import_module("jax.experimental.mosaic.gpu")
    elif platform == "cpu":  # triangular systems, of layers with a state
        importlib.import_module("jaxlib.lapack").prepare_lapack_call("trsm_ffi", "float32")


def program_name(devices: Sequence[jax.Device], *parts: object) -> str:
    """Returns the name of what is stored for these devices, versions, flags and further parts."""
    kinds = f"{len(devices)} {devices[0].device_kind}"
    words = (*_environment(devices[0].platform), kinds, *map(described, parts))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def described(part: object) -> str:
    """Returns the ``repr`` of a value without what differs between processes of equal programs."""
    return _ACCIDENTAL.sub("", part if isinstance(part, str) else repr(part))


def _environment(platform: str) -> tuple[str, ...]:
    """Returns all that programs depend on besides a model: versions, settings, sources, CPU."""
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in _INDIFFERENT)
    }
    flags = {name: os.environ.get(name) for name in _FLAGS}
    return (*_versions(platform), described(settings), repr(flags))


@functools.cache
def _versions(platform: str) -> tuple[str, ...]:
    # The backend's own version has a driver's number, and is another where the device is absent.
    versions = [f"{name} {_version(name)}" for name in ("jax", "jaxlib", "flax", *_PLUGINS)]
    return (*versions, _sources(), platform, _cpu_features() if platform == "cpu" else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_features() -> str:
    """Returns the instruction sets of this CPU, for which XLA compiles."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sources() -> str:
    """Returns a hash of the code and the tuned tables that programs are traced from."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in _TRACED_FILES:
                digest.update(str(file.relative_to(root)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
