"""Files that other programs or people may have written: plain files of bounded size, strict JSON,
and logs of one JSON object per line whose last line may be cut.
"""

import json
import os
import re
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxinfra.errors import CheckpointError, ConfigError, JaxinfraError

_DIGITS = 18  # those of any size; Python itself refuses to read thousands


def whole_number(text: str) -> int | None:
    """Parses up to 18 decimal digits into an integer; returns None for any other text."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


def is_text(word: str) -> bool:
    """Whether a word of a command line is Unicode: other bytes become lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


JSON_BYTES = 256 << 20
"""Largest JSON file read: a tokenizer of a million tokens has a tenth of it."""
JSON_DEPTH = 200
"""Deepest nesting of lists and objects read."""


def read_bytes(
    path: Path, *, limit: int = JSON_BYTES, error: type[JaxinfraError] = ConfigError
) -> bytes:
    """Reads the bytes of a plain file.

    Raises:
        error: no such file, a directory, pipe or device (a pipe could be waited for for ever), or
            more than ``limit`` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise error(f"{path} is {_kind(info.st_mode)}; a plain file is needed")
            data = file.read(limit + 1)
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure
    if len(data) > limit:
        raise error(f"{path} has {info.st_size:,} bytes; at most {limit:,} are read")
    return data


def require_plain(path: Path, *, error: type[JaxinfraError] = ConfigError) -> None:
    """Raises ``error`` for a directory, pipe or device, on which a read might wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure
    if not stat.S_ISREG(mode):
        raise error(f"{path} is {_kind(mode)}; a plain file is needed")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


INFINITY = {"Infinity": {"__float__": "Infinity"}}
"""The constant that configs of models write beside JSON, and how their newer releases spell it."""


def read_json(
    path: Path,
    *,
    holds: Any = dict[str, Any],
    error: type[JaxinfraError] = ConfigError,
    remedy: str = "write or copy it anew",
    constants: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Reads a JSON file and checks its type, as ``parse_json`` does."""
    data = read_bytes(path, error=error)
    return parse_json(
        data, where=str(path), holds=holds, error=error, remedy=remedy, constants=constants
    )


def parse_json(
    data: bytes | str,
    *,
    where: str,
    holds: Any = dict[str, Any],
    error: type[JaxinfraError] = ConfigError,
    remedy: str = "write or copy it anew",
    constants: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Parses a JSON text in UTF-8 and checks its type.

    Args:
        where: name of the text in error messages.
        holds: the required type: JSON's types, ``list[T]``, ``dict[str, T]``, unions or Any.
        constants: values of NaN, Infinity or -Infinity; those without one are refused.

    Raises:
        error: the text is not JSON (RFC 8259: no NaN, no Infinity, no name twice in one object),
            nested too deeply, or of another type; or it spells half of a character (section 8.2).
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        _require_depth(text)
        value = json.loads(
            text,
            parse_constant=lambda name: (
                constants[name] if name in constants else _no_constant(name)
            ),
            object_pairs_hook=_object,
        )
        if _SURROGATE.search(text):
            _require_characters(value)
    except (ValueError, RecursionError) as failure:
        raise error(f"{where}: not JSON ({failure}); {remedy}") from failure
    require_type(value, holds, where=where, error=error, remedy=remedy)
    return value


def require_type(
    value: Any, holds: Any, *, where: str, error: type[JaxinfraError], remedy: str = "correct it"
) -> None:
    """Raises ``error`` naming the first part of a JSON value that is not of its type."""
    found = _mismatch(value, holds, "")
    if found is not None:
        path, part, wanted = found
        place = ": ".join(each for each in (where, path) if each)
        raise error(f"{place}: {_shown(part)} is no {_name(wanted)}; {remedy}")


def is_of_type(value: Any, holds: Any) -> bool:
    """Whether a JSON value matches a type such as ``list[int]`` or ``dict[str, Any]``."""
    return _mismatch(value, holds, "") is None


def _mismatch(value: Any, hint: Any, path: str) -> tuple[str, Any, Any] | None:
    """Path, value and type of the first part that does not fit; None where all does."""
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        fits = any(_mismatch(value, each, path) is None for each in arguments)
        return None if fits else (path, value, hint)
    parts: list[tuple[str, Any, Any]] = []  # name, value and type of each
    if typing.is_typeddict(hint):
        if not isinstance(value, dict):
            return path, value, dict
        for name, kind in typing.get_type_hints(hint).items():
            if name in value:
                parts.append((name, value[name], kind))
            elif name in hint.__required_keys__:
                return f"{path}.{name}".lstrip("."), None, kind
    else:
        kind = origin or hint
        # JSON's true is an int in Python, and no number; a whole number is a number.
        fits = type(value) is kind or (kind is float and type(value) is int)
        if value is None:
            fits = kind is type(None)
        if not fits:
            return path, value, hint
        if kind is list and arguments:
            parts = [(str(number), each, arguments[0]) for number, each in enumerate(value)]
        elif kind is dict and arguments:
            parts = [(name, each, arguments[1]) for name, each in value.items()]
    for name, each, inner in parts:
        if found := _mismatch(each, inner, f"{path}.{name}".lstrip(".")):
            return found
    return None


_NAMES = {dict: "object", list: "list", str: "text", int: "whole number", float: "number"}


def _name(hint: Any) -> str:
    if typing.is_typeddict(hint):
        return _NAMES[dict]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_name(each) for each in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return "null" if kind is type(None) else _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _require_depth(text: str) -> None:
    """Raises ValueError before the parser's recursion would end."""
    if text.count("[") + text.count("{") <= JSON_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > JSON_DEPTH:
            raise ValueError(f"nested deeper than {JSON_DEPTH}")


_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BRACKET = re.compile(r"[\[\]{}]")


def _require_characters(value: Any) -> None:
    """Raises ValueError where an escape spells half of a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a character, {error.object[error.start]!a}, in it") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return found


LINES_BYTES = 4 << 30
"""Largest file of lines read: ten million steps have a tenth of it."""


def read_log(file: Path, *, holds: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """Reads a log's lines that are objects of type ``holds``, and the line numbers of damaged ones.

    For logs that only inform: a damaged line stops nothing.
    """
    found, damaged = [], []
    for number, line in enumerate(_lines(file), start=1):
        try:
            found.append(parse_json(line, where=str(file), holds=holds))
        except ConfigError:
            if line.endswith(b"\n"):  # else a kill has cut it short
                damaged.append(number)
    return found, damaged


def _lines(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    return read_bytes(file, limit=LINES_BYTES, error=CheckpointError).splitlines(keepends=True)


def drop_cut_line(file: Path) -> None:
    """Truncates a file after its last line break, so that the next line stands alone."""
    if not file.exists():
        return
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with file.open("r+b") as opened:
            opened.truncate(end)


def local_path(place: str | Path) -> Path:
    """Returns a run's path; raises ConfigError for a URL such as gs://bucket/run.

    Checkpoints are committed by an atomic rename, which object stores do not have.
    """
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(place)):
        raise ConfigError(
            f"{place} is a URL: runs are kept in directories that all processes see, as a shared "
            "file system has them; name one, and copy the run when it is done"
        )
    return Path(place)


def user_cache() -> Path:
    """Returns the user's cache directory of corpora, programs and measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfra"


def new_run_directory(name: str) -> Path:
    """Returns the first directory of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    number = 1
    while (path := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return path
