"""Encoding of answers as tokens, in pairs or single; the loss counts them, not the prompts."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxinfra.config.data import PAIRED, DataConfig, DataFormat
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

_LABELLED = (
    'each line must be {"prompt": ..., "completion": ..., "label": true or false}, the first two '
    "each a text or a list of messages"
)

BAD = 2
"""Mark of the counted tokens of a bad answer; those of other answers have 1."""


@final
class PairEncoder:
    """Tokenizes answers: each row becomes two documents, which are compared.

    A pair becomes a prompt with its chosen and with its rejected answer. A single, labelled answer
    becomes the prompt with it, and the prompt with the answer of the row before. By the latter kto
    estimates how far the model is from its reference.

    Args:
        chat: encoder that renders answers as conversations; None: an answer's text follows the
            prompt's, and ends with the separator.
        form: the rows' format, one of ``PAIRED``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        *,
        form: DataFormat = DataFormat.PREFERENCES,
    ):
        self._tokenizer = tokenizer
        self._chat = chat
        self._form = form
        self._before: Any = None  # the completion of the last row so far
        self.bos_id = tokenizer.bos_id if chat is None else chat.bos_id

    def encode_batch(self, documents: Sequence[Document]) -> list[list[EncodedChat]]:
        """Returns two documents for each JSON line: the chosen answer before the rejected one, or a
        row's own answer before the other.

        Raises:
            DataError: a row is invalid; the message names it and says why.
        """
        if self._form is not DataFormat.LABELLED:
            encoded = self._encoded(documents, [_parse(each) for each in documents])
            if self._form is DataFormat.SCORED:
                return [[_at_end(answer, self._tokenizer) for answer in pair] for pair in encoded]
            return encoded
        rows = [_parse_labelled(each) for each in documents]
        others = [self._before or rows[-1]["completion"], *(row["completion"] for row in rows[:-1])]
        self._before = rows[-1]["completion"]
        pairs = [
            {**row, "chosen": row["completion"], "rejected": other}
            for row, other in zip(rows, others, strict=True)
        ]
        return [
            [answer if row["label"] else _as_bad(answer), other]
            for row, (answer, other) in zip(rows, self._encoded(documents, pairs), strict=True)
        ]

    def _encoded(
        self, documents: Sequence[Document], rows: Sequence[Mapping[str, Any]]
    ) -> list[list[EncodedChat]]:
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
                    which = f"{kind} answer" if self._form is not DataFormat.LABELLED else "answer"
                    raise DataError(f"{name}: the {which} has no token")
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
    elif config.format not in PAIRED:
        return _completion_texts(document)[0]
    else:
        pair = _parse(document) if config.format is not DataFormat.LABELLED else None
        if pair is None:
            single = _parse_labelled(document)
            pair = {**single, "chosen": single["completion"], "rejected": single["completion"]}
        if config.chat_template is None:
            return _pair_texts(name, pair)[0]
        row = _talks(name, pair)[0]
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


def _parse_labelled(document: Document) -> Mapping[str, Any]:
    row = parse_json(document.text, where=document.name, error=DataError, remedy=EACH_LINE)
    missing = [field for field in ("prompt", "completion", "label") if row.get(field) is None]
    if missing:
        raise DataError(f"{document.name}: no {' and no '.join(missing)}; {_LABELLED}")
    if not isinstance(row["label"], bool):
        raise DataError(f"{document.name}: label={row['label']!r} is no true or false")
    return row


def _as_bad(answer: EncodedChat) -> EncodedChat:
    return dataclasses.replace(answer, counted=np.where(answer.counted, BAD, 0).astype(np.uint8))


def _at_end(answer: EncodedChat, tokenizer: Tokenizer) -> EncodedChat:
    """Marks the place after a document's last token, where a reward model's score is read."""
    tokens = np.append(answer.tokens, tokenizer.eos_id).astype(np.int32)
    counted = np.zeros(len(tokens), bool)
    counted[-1] = True
    return dataclasses.replace(answer, tokens=tokens, counted=counted)


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
