"""Pairs of answers to tokens: the prompt is context, the loss counts the answer."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxinfra.data.chat import (
    ASSISTANT,
    ChatEncoder,
    ChatRow,
    EncodedChat,
    check_messages,
    tools_of,
    with_system,
)
from jaxinfra.data.readers import EACH_LINE, Document
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json

_FORMS = (
    'each line must be {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of '
    "messages; without a prompt the answers are whole conversations that begin alike"
)


@final
class PairEncoder:
    """Tokenizes pairs: a prompt with a chosen and a rejected answer becomes two documents.

    Args:
        chat: encoder that renders pairs as conversations; None: an answer's text follows the
            prompt's, and ends with the separator.
    """

    per_row = 2  # documents that a line becomes

    def __init__(self, tokenizer: Tokenizer, chat: ChatEncoder | None):
        self._tokenizer = tokenizer
        self._chat = chat
        self.bos_id = tokenizer.bos_id if chat is None else chat.bos_id

    def encode_batch(self, documents: Sequence[Document]) -> list[EncodedChat]:
        """Returns the tokens of pairs in JSON lines, each chosen answer before its rejected one.

        Raises:
            DataError: a pair is invalid; the message names it and says why.
        """
        rows = [_parse(document) for document in documents]
        names = [document.name for document in documents]
        if self._chat is not None:
            each = [c for name, row in zip(names, rows, strict=True) for c in _talks(name, row)]
            encoded = self._chat.encode(each)
        else:
            encoded = self._texts(names, rows)
        for number, answer in enumerate(encoded):
            if not answer.counted.any():
                kind = "rejected" if number % 2 else "chosen"
                raise DataError(f"{names[number // 2]}: the {kind} answer has no token")
        return encoded

    def _texts(self, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[EncodedChat]:
        fields = ("prompt", "chosen", "rejected")
        for name, row in zip(names, rows, strict=True):
            for field in fields:
                if not isinstance(row.get(field), str):
                    raise DataError(
                        f"{name}: {field} is {type(row.get(field)).__name__}; without a chat "
                        "template all three must be text: give --chat for messages"
                    )
        ids = self._tokenizer.encode_batch([row[field] for row in rows for field in fields])
        encoded = []
        for number, row in enumerate(rows):
            prompt = ids[3 * number]
            for place, field in ((1, "chosen"), (2, "rejected")):
                answer = np.append(ids[3 * number + place], self._tokenizer.eos_id)
                counted = np.zeros(len(prompt) + len(answer), bool)
                counted[len(prompt) :] = bool(row[field])
                encoded.append(
                    EncodedChat(
                        tokens=np.concatenate([prompt, answer]).astype(np.int32),
                        counted=counted,
                        text=row[field],
                    )
                )
        return encoded


def _parse(document: Document) -> Mapping[str, Any]:
    row = parse_json(document.text, where=document.name, error=DataError, remedy=EACH_LINE)
    missing = [field for field in ("chosen", "rejected") if field not in row]
    if missing:
        raise DataError(f"{document.name}: no {' and no '.join(missing)}; {_FORMS}")
    return row


def _talks(name: str, row: Mapping[str, Any]) -> list[ChatRow]:
    """The two conversations of a row."""
    prompt = _messages(row.get("prompt", []), role="user", where=name)
    answers = [_messages(row[each], role=ASSISTANT, where=name) for each in ("chosen", "rejected")]
    if not all(answers):
        raise DataError(f"{name}: an answer is neither text nor messages; {_FORMS}")
    if all(_role(answer[0]) != ASSISTANT for answer in answers):
        num_given = _num_alike(*answers)  # whole conversations, whatever prompt stands beside
    else:
        num_given = len(prompt)
        answers = [[*prompt, *answer] for answer in answers]
    if num_given == 0 or any(
        all(_role(message) != ASSISTANT for message in answer[num_given:]) for answer in answers
    ):
        raise DataError(
            f"{name}: no prompt, or an answer in which the model says nothing; {_FORMS}"
        )
    length = len(answers[0])
    answers = [with_system(answer, row, where=name) for answer in answers]
    num_given += len(answers[0]) - length
    for answer in answers:
        check_messages(answer, where=name)
    given = sum(_role(message) == ASSISTANT for message in answers[0][:num_given])
    tools = tools_of(row, where=name)
    return [ChatRow(name=name, messages=answer, tools=tools, num_given=given) for answer in answers]


def _messages(value: Any, *, role: str, where: str) -> list[Any]:
    """A text as a message of that role, a message as a list of one; nothing for other kinds."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _num_alike(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of messages that two conversations share at their beginning."""
    num = 0
    while num < min(len(first), len(second)) and first[num] == second[num]:
        num += 1
    return num
