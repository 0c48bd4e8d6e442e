"""Encoding of conversations as tokens, with marks on the tokens that the loss counts.

The loss counts the assistant's messages. A conversation becomes one document, or several that each
contain some of its messages (``data/turns.py``). The tokens before an assistant message are checked
to be the prompt that the model would generate it from.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxinfra.config.data import Turns
from jaxinfra.data.chat_template import ChatTemplate, Message, check_message
from jaxinfra.data.readers import EACH_LINE, Document
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.turns import ASSISTANT, Rendering, turn_renderings
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.runtime.files import parse_json, require_type


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChat:
    """Tokens of one document after its first token, and which of them the loss counts."""

    tokens: np.ndarray  # int32
    counted: np.ndarray  # of each token: bool, or a mark that is not 0
    text: str  # of the counted tokens
    first: int  # the document's first token, before ``tokens``


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation to encode, with the tools it may call."""

    name: str  # in errors
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    num_context: int = 0  # number of first assistant messages that the loss does not count
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the template

    def counted(self) -> list[int]:
        """Returns the indices of the messages that the loss counts."""
        said = [n for n, message in enumerate(self.messages) if message["role"] == ASSISTANT]
        return [n for n in said[self.num_context :] if _counts(self.messages[n])]


def _counts(message: Message) -> bool:
    return all(message.get(key) is None or message[key] for key in _COUNTED_KEYS)


@final
class ChatEncoder:
    """Renders conversations by a chat template, tokenizes them and marks counted tokens.

    ``bos_id`` is the first token of a rendered conversation of one user message.

    Args:
        turns: which assistant messages the loss counts, and how they are divided among texts.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, *, turns: Turns = Turns.PREFIXES
    ):
        self._template = template
        self._tokenizer = tokenizer
        self._turns, self._ends = turns, frozenset(tokenizer.end_ids)
        self._counts = collections.Counter[str]()
        probe = tokenizer.encode_rendered([template.render([{"role": "user", "content": "x"}])])
        if not probe[0].size:
            raise DataError("the chat template renders a message to nothing")
        self.bos_id = int(probe[0][0])

    def encode_batch(self, documents: Sequence[Document]) -> list[list[EncodedChat]]:
        """Returns the documents of each conversation in JSON lines.

        Raises:
            DataError: a conversation is invalid; the message names it and says why.
        """
        return self.encode([parse_conversation(document) for document in documents])

    def encode(self, conversations: Sequence[ChatRow]) -> list[list[EncodedChat]]:
        """Returns each conversation's documents; the first includes the last counted message.

        Raises:
            DataError: a conversation is invalid; the message names it and says why.
        """
        rendered = [self._render(each) for each in conversations]
        # Where a span begins or ends, the text is cut: the tokens up to there are counted.
        cuts = [
            [part.text, *(part.text[:at] for span in part.spans for at in span)]
            for parts in rendered
            for part in parts
        ]
        flat = iter(self._tokenizer.encode_rendered([piece for each in cuts for piece in each]))
        return [
            [
                self._mark(each.name, part, next(flat), [next(flat) for _ in range(num_cuts)])
                for part, num_cuts in ((part, 2 * len(part.spans)) for part in parts)
            ]
            for each, parts in zip(conversations, rendered, strict=True)
        ]

    def notes(self) -> list[str]:
        """Returns log lines on conversations that were split, or whose messages do not count."""
        counts, lines = self._counts, []
        if counts["split"]:
            lines.append(
                f"{counts['split']:,} of {counts['conversations']:,} conversations are "
                f"{counts['documents of split']:,} documents: the chat template changes earlier "
                "text as they go on, so each turn of the model is in a text that asks for it "
                f"(data.turns={self._turns})"
            )
        if counts["left out"]:
            lines.append(
                f"{counts['left out']:,} turns of the model before the last do not count "
                f"(data.turns={self._turns})"
            )
        if counts["unasked"]:
            lines.append(
                f"{counts['unasked']:,} turns of the model begin otherwise than the chat "
                "template's generation prompt; they count from where the template writes them"
            )
        if counts["endless"]:
            lines.append(
                f"{counts['endless']:,} turns of the model have no end token that counts, so the "
                "model does not learn to stop after them: have the chat template write one"
            )
        return lines

    def _render(self, each: ChatRow) -> list[Rendering]:
        counted = each.counted()
        if self._turns is Turns.LAST:
            self._counts["left out"] += len(counted[:-1])
            counted = counted[-1:]
        try:
            template = self._template.with_settings(each.settings)
            parts = turn_renderings(template, each.messages, counted, tools=each.tools)
        except (ConfigError, DataError) as error:
            raise DataError(f"{each.name}: {error}") from error
        self._counts["conversations"] += 1
        self._counts["unasked"] += sum(part.num_unprompted for part in parts)
        if len(parts) > 1:
            self._counts["split"] += 1
            self._counts["documents of split"] += len(parts)
        return parts

    def _mark(
        self, name: str, part: Rendering, ids: np.ndarray, prefixes: list[np.ndarray]
    ) -> EncodedChat:
        text, spans = part.text, part.spans
        if not ids.size:
            raise DataError(f"{name}: the chat template renders it to nothing")
        counted = np.zeros(len(ids), bool)
        for number, (first, last) in enumerate(spans):
            for cut, prefix in zip((first, last), prefixes[2 * number :], strict=False):
                if not np.array_equal(ids[: len(prefix)], prefix):
                    raise DataError(
                        f"{name}: a token reaches across the {'start' if cut == first else 'end'} "
                        f"of the model's turn, at {text[max(cut - 12, 0) : cut + 12]!r}, so what "
                        "the model is to write is not what it would be asked for; begin the "
                        "message without white space, or end the prompt with a special token"
                    )
            start, end = (len(each) for each in prefixes[2 * number : 2 * number + 2])
            counted[start:end] = True
            if self._ends.isdisjoint(ids[start:end].tolist()):
                ids, counted = self._closed(ids, counted, end, is_marked=part.is_marked)
        if counted[0]:
            raise DataError(f"{name}: the model's turn begins the text; nothing asks for it")
        return EncodedChat(
            tokens=ids[1:],
            counted=counted[1:],
            text="".join(text[a:b] for a, b in spans),
            first=int(ids[0]),
        )

    def _closed(
        self, ids: np.ndarray, counted: np.ndarray, end: int, *, is_marked: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens, and which count, with the end of a turn that has no end token itself.

        In some families the next turn's beginning is an end token, at which generation stops.
        """
        if not is_marked and end < len(ids) and int(ids[end]) in self._ends:
            counted[end] = True
        elif not is_marked and end == len(ids) and self._next_turn is not None:
            return np.append(ids, np.int32(self._next_turn)), np.append(counted, True)
        else:
            self._counts["endless"] += 1
        return ids, counted

    @functools.cached_property
    def _next_turn(self) -> int | None:
        """The end token that a question after a turn of the model begins with; None: another."""
        roles = [("user", "x"), (ASSISTANT, "y"), ("user", "z")]
        talk = [{"role": role, "content": text} for role, text in roles]
        try:
            (_, last), *_ = turn_renderings(self._template, talk, [1])[0].spans or [(0, 0)]
            text = self._template.render(talk, add_generation_prompt=False)
        except DataError:
            return None
        whole, before = self._tokenizer.encode_rendered([text, text[:last]])
        token = int(whole[len(before)]) if last and len(before) < len(whole) else None
        return token if token in self._ends else None


# Of OpenAI, and of Axolotl's two spellings: whether the loss counts a turn of the model.
_COUNTED_KEYS = ("weight", "train", "training")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, ASSISTANT: ASSISTANT}
_SHAREGPT_ROLES |= {"chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT, "system": "system"}
_SHAREGPT_ROLES |= {"observation": "tool"}


def as_messages(row: Mapping[str, Any], *, where: str) -> Any:
    """Returns a row's messages in order, from any of three formats; None if it has none.

    The formats are ``messages`` with role and content; ``conversations`` with from and value
    (ShareGPT); and ``instruction`` with an ``input`` that may be empty, ``output`` and a
    ``history`` of pairs (Alpaca). A ``system`` text may precede any of them.
    """
    messages = from_json(row.get("messages"), where=where)
    turns = from_json(row.get("conversations"), where=where)
    if messages is None and isinstance(turns, list):
        messages = [_turn(turn, where) if isinstance(turn, dict) else turn for turn in turns]
    if messages is None and {"instruction", "output"} <= row.keys():
        asked, given = row["instruction"], row.get("input")
        if isinstance(asked, str) and isinstance(given, str) and given:
            asked = f"{asked}\n\n{given}" if asked else given
        past = from_json(row.get("history") or [], where=where)
        require_type(past, list[list[str]], where=f"{where}: history", error=DataError)
        messages = [
            {"role": role, "content": text}
            for pair in (*past, (asked, row["output"]))
            for role, text in zip(("user", ASSISTANT), pair, strict=True)
        ]
    return with_system(messages, row, where=where) if isinstance(messages, list) else messages


def with_system(messages: list[Any], row: Mapping[str, Any], *, where: str) -> list[Any]:
    """Puts a row's ``system`` text, if any, before its messages."""
    system = row.get("system") or ""
    require_type(system, str, where=f"{where}: system", error=DataError)
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if system and first.get("role") == "system" and first.get("content") != system:
        raise DataError(
            f"{where}: a system text of the row and another in its first message; leave one out"
        )
    if not system or first.get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def from_json(value: Any, *, where: str) -> Any:
    """Returns a column's value, parsed if it is a list written as JSON text, as in some tables.

    In JSON columns of ``datasets``, each element of a list is JSON text.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parse_json(value, where=where, holds=list[Any], error=DataError)
    return value


def _turn(turn: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A turn of ShareGPT as a message; roles that are not known stay, and so do messages."""
    if isinstance(turn.get("role"), str):
        return turn
    speaker, value = turn.get("from"), turn.get("value")
    told = {key: turn[key] for key in _COUNTED_KEYS if turn.get(key) is not None}
    if speaker == "function_call":
        place, holds = f"{where}: function_call", dict[str, Any] | list[dict[str, Any]]
        calls = parse_json(str(value), where=place, holds=holds, error=DataError)
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call.get("name"), str) for call in calls):
            raise DataError(f"{place} {str(value)[:60]} has no name; name one of the tools")
        called = [{"type": "function", "function": call} for call in calls]
        return {"role": ASSISTANT, "content": None, "tool_calls": called} | told
    role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
    return {"role": role, "content": value} | told


def parse_conversation(document: Document) -> ChatRow:
    """Returns messages and tools of a JSON line; raises DataError if it is invalid.

    If a line has a ``prompt`` and a ``completion``, each a text or messages, the loss counts only
    the completion.
    """
    where = document.name
    row = parse_json(document.text, where=where, error=DataError, remedy=EACH_LINE)
    messages, num_context = as_messages(row, where=where), 0
    if messages is None and row.get("completion") is not None:
        prompt = as_messages_of(row.get("prompt"), role="user")
        messages = [*prompt, *as_messages_of(row["completion"], role=ASSISTANT)]
        num_context = sum(role_of(message) == ASSISTANT for message in prompt)
        messages = with_system(messages, row, where=where)
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f'{where}: no messages; each line must be {{"messages": [{{"role": ..., "content": '
            '...}, ...]}, {"prompt": ..., "completion": ...} of texts or messages, '
            '{"conversations": [{"from": ..., "value": ...}, ...]} as ShareGPT has it, or '
            '{"instruction": ..., "input": ..., "output": ...} as Alpaca has it'
        )
    check_messages(messages, where=where)
    return ChatRow(
        name=where,
        messages=messages,
        tools=tools_of(row, where=where),
        num_context=num_context,
        settings=settings_of(row, where=where),
    )


def as_messages_of(value: Any, *, role: str) -> list[Any]:
    """Returns a text or message as a list of one message; a list unchanged; else an empty list.

    Args:
        role: role of the message that a text becomes.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []


def role_of(message: Any) -> Any:
    """Returns a message's role; None if it is no message."""
    return message.get("role") if isinstance(message, dict) else None


def settings_of(row: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Returns a row's settings for the chat template: its ``chat_template_kwargs``, as in TRL."""
    settings = row.get("chat_template_kwargs") or {}
    require_type(settings, dict[str, Any], where=f"{where}: chat_template_kwargs", error=DataError)
    return settings


def tools_of(row: Mapping[str, Any], *, where: str) -> list[dict[str, Any]] | None:
    """Returns the tools that a row's messages may call; None if it lists none."""
    tools = from_json(row.get("tools"), where=where)
    require_type(tools, list[dict[str, Any]] | None, where=f"{where}: tools", error=DataError)
    return tools or None


def check_messages(messages: Sequence[Any], *, where: str) -> None:
    """Raises DataError unless ``messages`` are valid and at least one is by the model."""
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        check_message(message, where=place)
        role = message["role"]
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{place} ({role}) has content NoneType; it must be text")
        for key in _COUNTED_KEYS:
            value = message.get(key)
            if value is not None and value not in ((0, 1) if role == ASSISTANT else (0,)):
                raise DataError(
                    f"{place} ({role}) has {key}={value!r}; a turn of the model counts (1 or true) "
                    "or does not (0 or false), and others never do"
                )
    if all(message["role"] != ASSISTANT for message in messages):
        raise DataError(f"{where}: no message of role {ASSISTANT!r}, so nothing to learn from")
