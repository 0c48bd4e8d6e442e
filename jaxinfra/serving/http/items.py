"""An answer as a list of items: texts, reasoning and calls, which open, grow and close as it comes.

Chat completions, Responses and Messages are three formats of this list.
"""

import dataclasses
import enum
import secrets
import string
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, final

from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress
from jaxinfra.serving.http.answers import (
    FINISH,
    GenerationFailedError,
    ProgressBatches,
    Usage,
    event,
)
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.tools.reader import Piece, PieceKind

_ALPHABET = string.ascii_letters + string.digits
_CALL_ID_LENGTH = 24


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class AnswerItem:
    """One item of an answer: a text, reasoning or a tool call, as far as it is generated."""

    kind: PieceKind  # TEXT, REASONING or CALL
    index: int  # among the answer's items
    place: int  # among its items of this kind
    id: str = ""  # of a call
    name: str = ""  # of a call's function
    text: str = ""  # or the call's arguments as JSON text
    is_cut: bool = False  # the answer ended within it before the model did


class ChangeKind(enum.Enum):
    """Kind of a change of an item."""

    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


class ItemChange(NamedTuple):
    """A change of one item."""

    kind: ChangeKind
    item: AnswerItem
    text: str = ""  # that is new


@final
class AnswerItems:
    """Collects one answer's items from its text while it is generated."""

    def __init__(self, turn: ChatTurn):
        self._parser, self._only_one = turn.parser(), turn.only_one
        self._id_length = turn.form.id_length if turn.form is not None else _CALL_ID_LENGTH
        self._open: AnswerItem | None = None
        self._num_tokens = turn.num_tokens
        self.items: list[AnswerItem] = []

    @property
    def calls(self) -> list[AnswerItem]:
        """The answer's calls so far."""
        return self.of(PieceKind.CALL)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the answer's reasoning so far, without its marks."""
        return sum(self._num_tokens(each.text) for each in self.of(PieceKind.REASONING))

    def of(self, kind: PieceKind) -> list[AnswerItem]:
        """Returns the items of a kind."""
        return [each for each in self.items if each.kind is kind]

    def take(self, text: str, finish: str | None) -> list[ItemChange]:
        """Adds the next text, and returns what changed.

        Args:
            finish: why the answer ended with this text; None: it goes on.
        """
        pieces = self._parser.push(text) if text else []
        pieces += self._parser.end() if finish is not None else []
        changes: list[ItemChange] = []
        for piece in pieces:
            changes += self._piece(piece)
        if finish is not None and self._open is not None:
            changes += self._close(is_whole=finish == "stop")
        return _merged(changes)

    def _piece(self, piece: Piece) -> list[ItemChange]:
        current, changes = self._open, []
        if piece.kind is PieceKind.ARGUMENTS:
            if current is not None and current.kind is PieceKind.CALL:
                changes.append(self._grow(current, piece.text))
            return changes
        is_same = current is not None and current.kind is piece.kind
        if current is None or not is_same or piece.kind is PieceKind.CALL:
            changes += self._close()
            if piece.kind is PieceKind.CALL and self._only_one and self.calls:
                return changes
            current = self._new(piece)
            changes.append(ItemChange(ChangeKind.OPENED, current))
        if piece.kind is not PieceKind.CALL:
            changes.append(self._grow(current, piece.text))
        return changes

    def _new(self, piece: Piece) -> AnswerItem:
        item = AnswerItem(kind=piece.kind, index=len(self.items), place=len(self.of(piece.kind)))
        if piece.kind is PieceKind.CALL:
            length = self._id_length
            own = "".join(secrets.choice(_ALPHABET) for _ in range(length))
            # Templates that ask for a length of ids take nothing before them.
            item.id = own if length < _CALL_ID_LENGTH else f"call_{own}"
            item.name = piece.text
        self.items.append(item)
        self._open = item
        return item

    def _grow(self, item: AnswerItem, text: str) -> ItemChange:
        item.text += text
        return ItemChange(ChangeKind.GREW, item, text)

    def _close(self, *, is_whole: bool = True) -> list[ItemChange]:
        item, self._open = self._open, None
        if item is None:
            return []
        changes, item.is_cut = [], not is_whole
        if item.kind is PieceKind.CALL and not item.text and is_whole:
            changes.append(self._grow(item, "{}"))  # a call without arguments
        return [*changes, ItemChange(ChangeKind.CLOSED, item)]


def _merged(changes: list[ItemChange]) -> list[ItemChange]:
    """Joins neighbouring growth of one item, so that a step tells it once."""
    result: list[ItemChange] = []
    for change in changes:
        last = result[-1] if result else None
        if (
            last is not None
            and last.item is change.item
            and last.kind is change.kind is ChangeKind.GREW
        ):
            result[-1] = last._replace(text=last.text + change.text)
        else:
            result.append(change)
    return result


class ItemsForm:
    """Formats one answer by its items; each endpoint has a subclass, which is final.

    Args:
        turn: the conversation that is answered.
    """

    def __init__(self, turn: ChatTurn):
        self.usage = Usage(prompts=[turn.prompt])
        self.items = AnswerItems(turn)
        self.end: EndReason | None = None
        self.stop: str | None = None  # the stop string that ended the answer

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the finished answer."""
        raise NotImplementedError

    def begin(self) -> Iterator[bytes]:
        """Yields the events that begin a stream."""
        raise NotImplementedError

    def events_of(self, change: ItemChange) -> Iterator[bytes]:
        """Yields the events of an item's change."""
        raise NotImplementedError

    def finish(self) -> Iterator[bytes]:
        """Yields the events that end a stream."""
        raise NotImplementedError

    def failed(self, message: str) -> Iterator[bytes]:
        """Yields the events of a stream that the engine could not finish."""
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        """Whether a length limit ended the answer before the model did."""
        return self.end in (EndReason.LENGTH, EndReason.CONTEXT)

    def take(self, progress: RequestProgress) -> list[ItemChange]:
        """Adds a step's progress, and returns what changed."""
        self.usage.count(0, progress)
        self.end, self.stop = progress.end, progress.stop
        finish = None if progress.end is None else FINISH[progress.end]
        return self.items.take(progress.text, finish)

    async def at_once(
        self, requests: list[GenerationRequest], batches: ProgressBatches
    ) -> dict[str, Any]:
        """Waits for the answer, and returns its JSON body.

        Raises:
            GenerationFailedError: the engine failed to finish the request.
        """
        del requests
        async for arrived in batches:
            for _, progress in arrived:
                if progress.end is EndReason.ERROR:
                    raise GenerationFailedError(progress.error)
                self.take(progress)
        return self.body()

    async def events(self, batches: ProgressBatches) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events; those that came at a time as one value."""
        yield b"".join(self.begin())
        async for arrived in batches:
            told = []
            for _, progress in arrived:
                if progress.end is EndReason.ERROR:
                    yield b"".join([*told, *self.failed(progress.error or "")])
                    return
                for change in self.take(progress):
                    told += self.events_of(change)
            if told:
                yield b"".join(told)
        yield b"".join(self.finish())


def named_event(kind: str, **fields: Any) -> bytes:
    """Formats a server-sent event whose type is its name too."""
    return b"event: %b\n%b" % (kind.encode(), event({"type": kind} | fields))
