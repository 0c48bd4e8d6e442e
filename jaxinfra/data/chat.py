"""Conversations to tokens, and which of them count: those that the model itself says.

What counts is told by the template. Where it marks the model's turns with ``{% generation %}``,
these are they. Else a turn is what the rendering of the conversation up to it adds to the rendering
of the conversation before it with the generation prompt: the text that the model would have been
asked to write. That holds for templates that never change what they wrote before, and is checked,
in text and in tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxinfra.data.chat_template import ChatTemplate, Message
from jaxinfra.data.readers import EACH_LINE, Document
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json

ASSISTANT = "assistant"

type Span = tuple[int, int]
"""A range of characters: first, and first no more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChat:
    """A conversation's tokens after the first, which begins all of them alike."""

    tokens: np.ndarray  # int32
    counted: np.ndarray  # bool, of each token
    text: str  # what counts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """What is to be encoded."""

    name: str  # in errors
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    num_given: int = 0  # turns of the model, the first ones, that are given and do not count


@final
class ChatEncoder:
    """Renders, tokenizes and marks conversations.

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
        """Tokens of JSON lines.

        Raises:
            DataError: what is wrong with one of them, which is named.
        """
        return self.encode([parse_conversation(document) for document in documents])

    def encode(self, conversations: Sequence[ChatRow]) -> list[EncodedChat]:
        """Tokens of conversations.

        Raises:
            DataError: what is wrong with one of them, which is named.
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
        turns = sum(message["role"] == ASSISTANT for message in each.messages)
        if each.num_given and len(spans) != turns:
            raise DataError(
                f"{each.name}: the chat template marks {len(spans)} turns of the model where there "
                f"are {turns}, so the {each.num_given} that are given cannot be told from the "
                "answer; mark every turn in it"
            )
        return text, spans[each.num_given :]

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
    """The conversation as text, and where the model's turns are in it.

    Raises:
        DataError: the template refuses the messages, or does not tell where the turns are.
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
                "goes on, so the model's turns cannot be told apart; mark them in the template "
                "with {% generation %} ... {% endgeneration %}"
            )
        spans.append((len(before), len(after)))
    return text, spans


_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, ASSISTANT: ASSISTANT}
_SHAREGPT_ROLES |= {"chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT, "system": "system"}


def as_messages(row: Mapping[str, Any]) -> Any:
    """The messages of a row in any of three forms, as they are found; None where there are none.

    ``messages`` of role and content; ``conversations`` of from and value (ShareGPT);
    ``instruction`` with an ``input`` that may be empty, and ``output`` (Alpaca).
    """
    if "messages" in row:
        return row["messages"]
    turns = row.get("conversations")
    if isinstance(turns, list):
        return [_turn(turn) if isinstance(turn, dict) else turn for turn in turns]
    if not {"instruction", "output"} <= row.keys():
        return None
    asked, given = row["instruction"], row.get("input")
    if isinstance(asked, str) and isinstance(given, str) and given:
        asked = f"{asked}\n\n{given}"
    messages = [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": row["output"]}]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT as a message; other roles than those it knows stay as they are."""
    speaker = turn.get("from")
    role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
    return {"role": role, "content": turn.get("value")}


def parse_conversation(document: Document) -> ChatRow:
    """The messages of a JSON line and the tools they may call; raises DataError naming it."""
    where = document.name
    row = parse_json(document.text, where=where, error=DataError, remedy=EACH_LINE)
    messages = as_messages(row)
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f'{where}: no messages; each line must be {{"messages": [{{"role": ..., "content": '
            '...}, ...]}, {"conversations": [{"from": ..., "value": ...}, ...]} as ShareGPT has '
            'it, or {"instruction": ..., "input": ..., "output": ...} as Alpaca has it'
        )
    check_messages(messages, where=where)
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is a {type(tools).__name__}; it must be a list")
    return ChatRow(name=where, messages=messages, tools=tools)


def check_messages(messages: Sequence[Any], *, where: str) -> None:
    """Raises DataError unless these are messages, and the model says one of them."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} has no role; it must be an object with one")
        content = message.get("content")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise DataError(
                f"{where}: message {number} ({message['role']}) has content "
                f"{type(content).__name__}; it must be text"
            )
    if all(message["role"] != ASSISTANT for message in messages):
        raise DataError(f"{where}: no message of role {ASSISTANT!r}, so nothing to learn from")
