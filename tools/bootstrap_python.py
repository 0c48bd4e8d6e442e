"""Finds a Python that can run jaxinfra.

A name on PATH proves nothing (a pyenv shim exists for versions that are not selected), so every
candidate is executed and asked what it is.
"""

from __future__ import annotations  # this file runs under any Python >= 3.8

import os
import pathlib
import subprocess
from dataclasses import dataclass
from typing import Iterator, Mapping

MINORS = (12, 13, 14)  # of Python 3, in the order we prefer them
SUPPORTED = f"3.{MINORS[0]} to 3.{MINORS[-1]}"

# The modules are those that a Python built without its C libraries lacks, and that we need.
_PROBE = """
import sys, sysconfig
import bz2, ctypes, lzma, ssl, zlib
print(sys.implementation.name, *sys.version_info[:3], sys.version_info.releaselevel,
      sys.maxsize > 2**32, bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
print(sys.executable)
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that runs here: the file, past shims and symbolic links, and its version."""

    path: pathlib.Path
    version: str


@dataclass(frozen=True)
class Rejected:
    """A candidate that cannot be used, and why."""

    path: pathlib.Path
    reason: str


def probe(candidate: pathlib.Path) -> Interpreter | Rejected:
    """Executes `candidate` and says what it is."""
    try:
        result = subprocess.run(
            [str(candidate), "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Rejected(candidate, f"does not run: {error}")
    lines = result.stdout.splitlines()
    if result.returncode or len(lines) != 2:
        words = (result.stderr.strip() or "prints nothing").splitlines()
        python_error = words[-1].startswith(("ImportError", "ModuleNotFoundError"))
        return Rejected(candidate, words[-1] if python_error else words[0])
    name, major, minor, micro, level, wide, free_threaded = lines[0].split()
    version = f"{major}.{minor}.{micro}"
    if name != "cpython":
        return Rejected(candidate, f"is {name}")
    if int(major) != 3 or int(minor) not in MINORS or level != "final":
        return Rejected(candidate, f"is {version}" + ("" if level == "final" else f" {level}"))
    if wide != "True" or free_threaded != "False":
        return Rejected(candidate, f"is a {'free-threaded' if wide == 'True' else '32-bit'} build")
    return Interpreter(pathlib.Path(os.path.realpath(lines[1])), version)


def candidates(env: Mapping[str, str], home: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files that may be a Python: PATH, pyenv's versions, uv's own, best first."""
    path = [pathlib.Path(entry) for entry in env.get("PATH", os.defpath).split(os.pathsep) if entry]
    pyenv_roots = {pathlib.Path(env.get("PYENV_ROOT") or home / ".pyenv"), home / ".pyenv"}
    data_home = pathlib.Path(env.get("XDG_DATA_HOME") or home / ".local" / "share")
    uv_root = pathlib.Path(env.get("UV_PYTHON_INSTALL_DIR") or data_home / "uv" / "python")
    for minor in MINORS:
        name = f"python3.{minor}"
        yield from (entry / name for entry in path)
        for root in sorted(pyenv_roots):
            yield from _newest_first(root / "versions", f"3.{minor}.*", name)
        yield from _newest_first(uv_root, f"cpython-3.{minor}.*", name)
    for name in ("python3", "python"):
        yield from (entry / name for entry in path)


def _newest_first(root: pathlib.Path, pattern: str, name: str) -> list[pathlib.Path]:
    def patch(version: pathlib.Path) -> int:
        digits = version.name.split("-")[1 if "-" in version.name else 0].split(".")[2]
        return int(digits) if digits.isdigit() else -1

    found = [version for version in root.glob(pattern) if version.name.count(".") >= 2]
    return [version / "bin" / name for version in sorted(found, key=patch, reverse=True)]


def find(env: Mapping[str, str], home: pathlib.Path) -> tuple[Interpreter | None, list[Rejected]]:
    """The best interpreter of this machine, and the candidates that were passed over."""
    rejected: list[Rejected] = []
    seen: set[tuple[str, str]] = set()
    for candidate in candidates(env, home):
        # Not the file's own real path: a version manager's shims may all be links to one program.
        place = (os.path.realpath(str(candidate.parent)), candidate.name)
        if place in seen or not os.access(str(candidate), os.X_OK) or candidate.is_dir():
            continue
        seen.add(place)
        answer = probe(candidate)
        if isinstance(answer, Interpreter):
            return answer, rejected
        rejected.append(answer)
    return None, rejected
