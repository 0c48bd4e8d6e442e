"""Encoding of pairs of answers as tokens; the loss counts the answers, not the prompts."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxinfra.config.data import DataConfig, DataFormat
from jaxinfra.data.chat import (
    ChatEncoder,
    ChatRow,
    EncodedChat,
    as_messages_of,
    check_messages,
    parse_conversation,
    role_of,
    settings_of,
    tools_of,
    with_system,
)
from jaxinfra.data.readers import EACH_LINE, Document
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.turns import ASSISTANT, common_prefix_length
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import parse_json

_FORMS = (
    'each line must be {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of '
    "messages; without a prompt the answers begin alike, with it"
)


@final
class PairEncoder:
    """Tokenizes pairs: a prompt with a chosen and a rejected answer becomes two documents.

    Args:
        chat: encoder that renders pairs as conversations; None: an answer's text follows the
            prompt's, and ends with the separator.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatEncoder | None):
        self._tokenizer = tokenizer
        self._chat = chat
        self.bos_id = tokenizer.bos_id if chat is None else chat.bos_id

    def encode_batch(self, documents: Sequence[Document]) -> list[list[EncodedChat]]:
        """Returns the tokens of pairs in JSON lines, each chosen answer before its rejected one.

        Raises:
            DataError: a pair is invalid; the message names it and says why.
        """
        rows = [_parse(document) for document in documents]
        names = [document.name for document in documents]
        if self._chat is not None:
            each = [c for name, row in zip(names, rows, strict=True) for c in _talks(name, row)]
            flat = [parts[0] for parts in self._chat.encode(each)]
            encoded = [flat[number : number + 2] for number in range(0, len(flat), 2)]
        else:
            texts = [_pair_texts(name, row) for name, row in zip(names, rows, strict=True)]
            encoded = _answers(self._tokenizer, texts)
        for name, pair in zip(names, encoded, strict=True):
            for kind, answer in zip(("chosen", "rejected"), pair, strict=True):
                if not answer.counted.any():
                    raise DataError(f"{name}: the {kind} answer has no token")
        return encoded

    def notes(self) -> list[str]:
        """Returns log lines on conversations that were split, or whose messages do not count."""
        return [] if self._chat is None else self._chat.notes()


@final
class CompletionEncoder:
    """Tokenizes plain-text prompts and completions; the loss counts the completions."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.bos_id = tokenizer.bos_id

    def encode_batch(self, documents: Sequence[Document]) -> list[list[EncodedChat]]:
        """Returns one document for each JSON line.

        Raises:
            DataError: a row is invalid; the message names it and says why.
        """
        return _answers(self._tokenizer, [_completion_texts(each) for each in documents])

    def notes(self) -> list[str]:
        """Returns no lines: each row is one document."""
        return []


def prompt_of(document: Document, config: DataConfig) -> str | ChatRow:
    """Returns a row's prompt text, or its messages before the first that the loss counts."""
    name = document.name
    if config.format is DataFormat.CHAT:
        row = parse_conversation(document)
    elif config.chat_template is not None:
        row = _talks(name, _parse(document))[0]
    elif config.format is DataFormat.PREFERENCES:
        return _pair_texts(name, _parse(document))[0]
    else:
        return _completion_texts(document)[0]
    first = next(iter(row.counted()), len(row.messages))
    return dataclasses.replace(row, messages=row.messages[:first])


def _completion_texts(document: Document) -> list[str]:
    name = document.name
    row = parse_json(document.text, where=name, error=DataError, remedy=EACH_LINE)
    return _require_texts(name, row, ("prompt", "completion"))


def _require_texts(name: str, row: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    for field in fields:
        if not isinstance(row.get(field), str):
            raise DataError(
                f"{name}: {field} is {type(row.get(field)).__name__}; without a chat template "
                f"{', '.join(fields)} must be text: give --chat for messages"
            )
    return [row[field] for field in fields]


def _pair_texts(name: str, row: Mapping[str, Any]) -> list[str]:
    """A row's prompt, chosen and rejected text; the prompt is what both begin with if it has none.

    Both answers begin with a whole word, and with the space before it, as tokenizers join them.
    """
    if row.get("prompt") is not None:
        return _require_texts(name, row, ("prompt", "chosen", "rejected"))
    answers = _require_texts(name, row, ("chosen", "rejected"))
    prompt = re.sub(r" ?\w*$", "", answers[0][: common_prefix_length(*answers)], flags=re.ASCII)
    return [prompt, *(answer.removeprefix(prompt) for answer in answers)]


def _answers(tokenizer: Tokenizer, texts: Sequence[Sequence[str]]) -> list[list[EncodedChat]]:
    """The documents of each row: its first text, followed by each of the others and the end."""
    ids = iter(tokenizer.encode_batch([text for row in texts for text in row]))
    encoded = []
    for row in texts:
        prompt, documents = next(ids), []
        for text in row[1:]:
            answer = np.append(next(ids), tokenizer.eos_id)
            counted = np.zeros(len(prompt) + len(answer), bool)
            counted[len(prompt) :] = bool(text)
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            documents.append(
                EncodedChat(tokens=tokens, counted=counted, text=text, first=tokenizer.bos_id)
            )
        encoded.append(documents)
    return encoded


def _parse(document: Document) -> Mapping[str, Any]:
    row = parse_json(document.text, where=document.name, error=DataError, remedy=EACH_LINE)
    missing = [field for field in ("chosen", "rejected") if field not in row]
    if missing:
        raise DataError(f"{document.name}: no {' and no '.join(missing)}; {_FORMS}")
    return row


def _talks(name: str, row: Mapping[str, Any]) -> list[ChatRow]:
    """The two conversations of a row."""
    prompt = as_messages_of(row.get("prompt"), role="user")
    answers = [as_messages_of(row[each], role=ASSISTANT) for each in ("chosen", "rejected")]
    if not all(answers):
        raise DataError(f"{name}: an answer is neither text nor messages; {_FORMS}")
    if all(role_of(answer[0]) != ASSISTANT for answer in answers):
        num_context = common_prefix_length(
            *answers
        )  # whole conversations, whatever prompt stands beside
    else:
        num_context = len(prompt)
        answers = [[*prompt, *answer] for answer in answers]
    if num_context == 0 or any(
        all(role_of(message) != ASSISTANT for message in answer[num_context:]) for answer in answers
    ):
        raise DataError(
            f"{name}: no prompt, or an answer in which the model says nothing; {_FORMS}"
        )
    length = len(answers[0])
    answers = [with_system(answer, row, where=name) for answer in answers]
    num_context += len(answers[0]) - length
    for answer in answers:
        check_messages(answer, where=name)
    given = sum(role_of(message) == ASSISTANT for message in answers[0][:num_context])
    tools, settings = tools_of(row, where=name), settings_of(row, where=name)
    return [
        ChatRow(name=name, messages=answer, tools=tools, num_context=given, settings=settings)
        for answer in answers
    ]
