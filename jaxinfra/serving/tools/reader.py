"""Parses an answer's text while it is generated: parsers are generators that wait for more text.

A parser takes text from the front of a ``TextReader`` and emits pieces. Text that fits no form is
emitted unchanged, so none is lost; white space next to a marker belongs to the marker.
"""

import enum
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, final

from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json


class PieceKind(enum.StrEnum):
    """Kind of a piece of an answer."""

    TEXT = "text"  # what the user reads
    REASONING = "reasoning"
    CALL = "call"  # begins a call; the text is the function's name
    ARGUMENTS = "arguments"  # of the last call: a part of their JSON text


class Piece(NamedTuple):
    """A part of an answer that is certain: text, reasoning, or part of a tool call."""

    kind: PieceKind
    text: str


type Reading[T] = Generator[None, None, T]
type AnswerSyntax = Callable[["TextReader"], Reading[None]]

_HEADER = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_KEYS = tuple(f'{{"{key}":' for key in ("name", "arguments", "parameters", "type", "id"))
_REST = re.compile(r'(?:null)?(?:\s*,\s*"(?:id|type|index)"\s*:\s*(?:"[^"]*"|\d+))*\s*\}?\s*')
_OUTSIDE = re.compile(r'[\s\w.+\-:,{}\[\]"]')  # characters of JSON that are not in a string
_LONGEST_HEADER = 512  # characters that may be held back until a call's name is known


@final
class JsonScan:
    """Finds where a JSON value ends, in text that comes in parts.

    Args:
        depth: number of objects and lists that are open already.
    """

    def __init__(self, depth: int = 0):
        self._depth = depth
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> tuple[int, bool]:
        """Scans the next text; returns how much of it belongs to the value, and whether the value
        ends there: closed, or broken by a character that cannot follow.
        """
        for at, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    if not self._depth:
                        return at + 1, True
                continue
            if not _OUTSIDE.match(character):
                return at, True
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1, True
        return len(text), False


@final
class TextReader:
    """Unparsed text of an answer so far, and the pieces parsed from it."""

    def __init__(self) -> None:
        self.text = ""
        self.is_ended = False
        self.pieces: list[Piece] = []
        self.follows_marker = False  # white space that comes next is the marker's

    def more(self) -> Reading[bool]:
        """Waits for more text; returns False if the answer has ended."""
        if self.is_ended:
            return False
        yield
        return True

    def emit(self, kind: PieceKind, text: str) -> None:
        """Adds a piece."""
        if kind in (PieceKind.TEXT, PieceKind.REASONING):
            text = text.lstrip() if self.follows_marker else text
            self.follows_marker &= not text
        if text or kind is PieceKind.CALL:
            self.pieces.append(Piece(kind, text))

    def call(self, name: str, arguments: str = "") -> None:
        """Adds a call of a function, with its arguments if they are known."""
        self.emit(PieceKind.CALL, name)
        self.emit(PieceKind.ARGUMENTS, arguments)
        self.follows_marker = True

    def take(self, length: int) -> str:
        """Removes text from the front, and returns it."""
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def until(self, marks: Sequence[str], kind: PieceKind) -> Reading[str]:
        """Emits the text up to the next marker; returns the marker, or "" at the end."""
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, mark = min(found, key=lambda each: (each[0], -len(each[1])))
                self.emit(kind, self.take(at).rstrip())
                self.take(len(mark))
                self.follows_marker = True
                return mark
            held = max(overlap(self.text, mark) for mark in marks)
            certain = self.text[: len(self.text) - held].rstrip()
            self.emit(kind, self.take(len(certain)))
            if not (yield from self.more()):
                self.emit(kind, self.take(len(self.text)))
                return ""

    def collect(self, marks: Sequence[str]) -> Reading[tuple[str, str]]:
        """Returns the text up to a marker, and the marker; at the end all text, and ""."""
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                text = self.take(at)
                self.take(len(mark))
                return text, mark
            if not (yield from self.more()):
                return self.take(len(self.text)), ""

    def starts(self, *marks: str) -> Reading[str]:
        """Removes and returns the marker that comes next, after white space; "" if none does."""
        while True:
            text = self.text.lstrip()
            for mark in marks:
                if text.startswith(mark):
                    self.take(len(self.text) - len(text) + len(mark))
                    self.follows_marker = True
                    return mark
            is_open = any(mark.startswith(text) for mark in marks)
            if not is_open or not (yield from self.more()):
                return ""

    def match(self, pattern: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """Removes and returns a pattern's match at the front; None if no further text can match.

        The pattern must end with what ends the match, for instance a look-ahead.
        """
        while (found := pattern.match(self.text)) is None:
            if len(self.text) > _LONGEST_HEADER or not (yield from self.more()):
                return None
        self.take(found.end())
        return found

    def arguments(self) -> Reading[bool]:
        """Emits the next JSON value as a call's arguments; returns False if it is incomplete.

        A string is taken as the arguments' JSON text, as some models write it.
        """
        while not self.text:
            if not (yield from self.more()):
                return False
        if self.text[0] == '"':
            text, is_whole = yield from self._value()
            value = json_or_none(text)
            self.emit(PieceKind.ARGUMENTS, value if isinstance(value, str) else text)
            return is_whole
        if self.text[0] not in "{[":
            return False
        scan = JsonScan()
        while True:
            length, is_closed = scan.end(self.text)
            self.emit(PieceKind.ARGUMENTS, self.take(length))
            if is_closed:
                return True
            if not (yield from self.more()):
                return False

    def json_call(self) -> Reading[bool]:
        """Emits the call that comes next as ``{"name": ..., "arguments": {...}}``.

        Returns False, and leaves the text, if there is none.
        """
        scan, seen = JsonScan(), 0
        while (header := _HEADER.match(self.text)) is None:
            begun = "".join(self.text[:_LONGEST_HEADER].split())
            if not any(begun.startswith(key) or key.startswith(begun) for key in _KEYS):
                return False
            length, is_closed = scan.end(self.text[seen:])
            seen += length
            if is_closed:
                return self._whole_call(seen)
            if not (yield from self.more()):
                return False
        self.take(header.end())
        self.call(str(json_or_none(header[1]) or header[1]))
        yield from self.arguments()
        rest, _ = yield from self._value(depth=1)
        if rest.startswith("null"):
            self.emit(PieceKind.ARGUMENTS, "{}")
        if not _REST.fullmatch(rest):
            self.emit(PieceKind.TEXT, rest)
        return True

    def _whole_call(self, length: int) -> bool:
        """Tells a call whose keys are in another order, from its complete text."""
        value = json_or_none(self.text[:length])
        called = named_call(value)
        if called is None:
            return False
        self.take(length)
        self.call(*called)
        return True

    def _value(self, *, depth: int = 0) -> Reading[tuple[str, bool]]:
        scan, text = JsonScan(depth), ""
        while True:
            length, is_closed = scan.end(self.text)
            text += self.take(length)
            if is_closed or not (yield from self.more()):
                return text, is_closed


def json_or_none(text: str) -> Any:
    """Returns the value of a JSON text that a model wrote; None if it is not JSON."""
    try:
        return parse_json(text, where="the answer", holds=Any, error=DataError)
    except DataError:
        return None


def named_call(value: Any) -> tuple[str, str] | None:
    """Returns name and arguments of a call given as a JSON object; None if it is no call."""
    known = {"name", "arguments", "parameters", "id", "type"}
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or value.keys() - known
    ):
        return None
    given = value.get("arguments", value.get("parameters"))
    if given is None or isinstance(given, str):
        return value["name"], given or "{}"
    return value["name"], json.dumps(given, ensure_ascii=False)


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of ``text`` that is a beginning of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)


_DONE = object()


@final
class AnswerParser:
    """Splits one answer into text, reasoning and tool calls while it is generated."""

    def __init__(self, parser: AnswerSyntax):
        self._reader = TextReader()
        self._steps = parser(self._reader)
        self._is_read = False  # whether what comes now is plain text

    def push(self, text: str) -> list[Piece]:
        """Adds text, and returns the pieces that are now certain."""
        self._reader.text += text
        return self._told()

    def end(self) -> list[Piece]:
        """Returns the pieces of the rest of the answer, at its end."""
        self._reader.is_ended = True
        return self._told()

    def _told(self) -> list[Piece]:
        reader = self._reader
        self._is_read = self._is_read or next(self._steps, _DONE) is _DONE
        if self._is_read:
            reader.emit(PieceKind.TEXT, reader.take(len(reader.text)))
        pieces, reader.pieces = reader.pieces, []
        return pieces
