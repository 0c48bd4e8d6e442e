"""Conversations to tokens, with a mark on those of the model's messages, which count.

If the template encloses the model's messages in ``{% generation %}``, the enclosed tokens count.
Otherwise a message is rendered twice: the conversation up to it, and the conversation before it
with the generation prompt. The difference is the text that the model would have to write, and
counts. That requires a template that never changes earlier text, which is checked, in text and in
tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxinfra.data.chat_template import ChatTemplate, Message, is_text_part
from jaxinfra.data.readers import EACH_LINE, Document
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json, require_type

ASSISTANT = "assistant"

type Span = tuple[int, int]
"""A range of characters: first, and first no more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChat:
    """A conversation's tokens without its first token, which all conversations have in common."""

    tokens: np.ndarray  # int32
    counted: np.ndarray  # bool, of each token
    text: str  # what counts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """A conversation to encode, with the tools it may call."""

    name: str  # in errors
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    num_given: int = 0  # turns of the model, the first ones, that are given and do not count


@final
class ChatEncoder:
    """Renders conversations by a chat template, tokenizes them and marks what the loss counts.

    ``bos_id`` is the token that every conversation begins with.
    """

    per_row = 1  # documents that a line becomes

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer):
        self._template = template
        self._tokenizer = tokenizer
        probe = tokenizer.encode_rendered([template.render([{"role": "user", "content": "x"}])])
        if not probe[0].size:
            raise DataError("the chat template renders a message to nothing")
        self.bos_id = int(probe[0][0])

    def encode_batch(self, documents: Sequence[Document]) -> list[EncodedChat]:
        """Returns the tokens of conversations in JSON lines.

        Raises:
            DataError: a conversation is invalid; the message names it and says why.
        """
        return self.encode([parse_conversation(document) for document in documents])

    def encode(self, conversations: Sequence[ChatRow]) -> list[EncodedChat]:
        """Returns the tokens of conversations.

        Raises:
            DataError: a conversation is invalid; the message names it and says why.
        """
        rendered = [self._render(each) for each in conversations]
        # Where a span begins or ends, the text is cut: the tokens up to there are counted.
        cuts = [[text, *(text[:at] for span in spans for at in span)] for text, spans in rendered]
        flat = self._tokenizer.encode_rendered([piece for each in cuts for piece in each])
        result, start = [], 0
        for each, (text, spans), pieces in zip(conversations, rendered, cuts, strict=True):
            ids, *prefixes = flat[start : start + len(pieces)]
            start += len(pieces)
            result.append(self._mark(each.name, text, spans, ids, prefixes))
        return result

    def _render(self, each: ChatRow) -> tuple[str, list[Span]]:
        try:
            text, spans = rendered_spans(self._template, each.messages, tools=each.tools)
        except DataError as error:
            raise DataError(f"{each.name}: {error}") from error
        said = [message for message in each.messages if message["role"] == ASSISTANT]
        counts = [
            number >= each.num_given and message.get("weight", 1) != 0
            for number, message in enumerate(said)
        ]
        if all(counts):
            return text, spans
        if len(spans) != len(said):
            raise DataError(
                f"{each.name}: the chat template marks {len(spans)} messages of the model where "
                f"there are {len(said)}, so those that do not count cannot be told from "
                "the others; mark every one in it"
            )
        return text, [span for span, does in zip(spans, counts, strict=True) if does]

    def _mark(
        self,
        name: str,
        text: str,
        spans: list[Span],
        ids: np.ndarray,
        prefixes: list[np.ndarray],
    ) -> EncodedChat:
        if not ids.size or ids[0] != self.bos_id:
            raise DataError(
                f"{name}: begins with another token than other conversations; begin the chat "
                "template with {{ bos_token }}"
            )
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
            counted[len(prefixes[2 * number]) : len(prefixes[2 * number + 1])] = True
        if counted[0]:
            raise DataError(f"{name}: the model's turn begins the text; nothing asks for it")
        return EncodedChat(
            tokens=ids[1:], counted=counted[1:], text="".join(text[a:b] for a, b in spans)
        )


def rendered_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[Span]]:
    """Renders a conversation and finds where the model's messages are in the text.

    Returns the text, and each message's start and end as character offsets.

    Raises:
        DataError: the template refuses the messages, or their place in the text is ambiguous.
    """
    text, spans = template.render_marked(messages, tools=tools)
    if spans is not None:
        if not any(last > first for first, last in spans):
            raise DataError("the template's generation blocks are empty: nothing to learn")
        return text, spans
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = template.render(messages[:number], tools=tools)
        after = template.render(messages[: number + 1], add_generation_prompt=False, tools=tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"message {number + 1}: the chat template changes earlier text as a conversation "
                "goes on, so the model's messages cannot be told apart; mark them in the template "
                "with {% generation %} ... {% endgeneration %}"
            )
        spans.append((len(before), len(after)))
    return text, spans


_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, ASSISTANT: ASSISTANT}
_SHAREGPT_ROLES |= {"chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT, "system": "system"}


def as_messages(row: Mapping[str, Any], *, where: str) -> Any:
    """Returns a row's messages in order, from any of three formats; None if it has none.

    The formats are ``messages`` with role and content; ``conversations`` with from and value
    (ShareGPT); and ``instruction`` with an ``input`` that may be empty, ``output`` and a
    ``history`` of pairs (Alpaca). A ``system`` text may precede any of them.
    """
    messages = from_json(row.get("messages"), where=where)
    turns = from_json(row.get("conversations"), where=where)
    if messages is None and isinstance(turns, list):
        messages = [_turn(turn) if isinstance(turn, dict) else turn for turn in turns]
    if messages is None and {"instruction", "output"} <= row.keys():
        asked, given = row["instruction"], row.get("input")
        if isinstance(asked, str) and isinstance(given, str) and given:
            asked = f"{asked}\n\n{given}"
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


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT as a message; other roles than those it knows stay as they are."""
    speaker = turn.get("from")
    role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
    told = {"weight": turn["weight"]} if turn.get("weight") is not None else {}
    return {"role": role, "content": turn.get("value")} | told


def parse_conversation(document: Document) -> ChatRow:
    """Returns messages and tools of a JSON line; raises DataError if it is invalid."""
    where = document.name
    row = parse_json(document.text, where=where, error=DataError, remedy=EACH_LINE)
    messages = as_messages(row, where=where)
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f'{where}: no messages; each line must be {{"messages": [{{"role": ..., "content": '
            '...}, ...]}, {"conversations": [{"from": ..., "value": ...}, ...]} as ShareGPT has '
            'it, or {"instruction": ..., "input": ..., "output": ...} as Alpaca has it'
        )
    check_messages(messages, where=where)
    return ChatRow(name=where, messages=messages, tools=tools_of(row, where=where))


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
        role, weight = message["role"], message.get("weight")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{place} ({role}) has content NoneType; it must be text")
        if weight is not None and weight not in ((0, 1) if role == ASSISTANT else (0,)):
            raise DataError(
                f"{place} ({role}) has weight={weight!r}; a turn of the model counts (1) or does "
                "not (0), and others never do"
            )
    if all(message["role"] != ASSISTANT for message in messages):
        raise DataError(f"{where}: no message of role {ASSISTANT!r}, so nothing to learn from")


def check_message(message: Any, *, where: str) -> None:
    """Raises DataError unless ``message`` has content that is text, text parts, or null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} has no role; it must be an object with one")
    content = message.get("content")
    if isinstance(content, list) and not all(is_text_part(part) for part in content):
        kinds = [part.get("type") if isinstance(part, dict) else part for part in content]
        raise DataError(
            f"{where} ({message['role']}) has content of parts {kinds}; text alone is read"
        )
    if content is not None and not isinstance(content, str | list):
        raise DataError(
            f"{where} ({message['role']}) has content {type(content).__name__}; it must be text"
        )
