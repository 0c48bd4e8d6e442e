"""Prompts of reinforcement learning: rows of files, encoded, in an order by rollout."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfra.config.run import RunConfig
from jaxinfra.data.chat_template import ChatTemplate, load_chat_template
from jaxinfra.data.readers import EACH_LINE, read_documents
from jaxinfra.data.sources import scan
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import is_of_type, parse_json, require_type


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt with the row that it comes from, which the reward reads."""

    ids: tuple[int, ...]
    text: str  # for messages, the content of the last one
    row: Mapping[str, Any]
    template: ChatTemplate | None = None  # if the prompt is a list of messages

    def reply_ids(
        self, reply: str | Sequence[Mapping[str, Any]], tokenizer: Tokenizer
    ) -> list[int]:
        """Returns the tokens of a reply to a completion, up to where the next one begins.

        Args:
            reply: a text, which is a user's message if the prompt is a list of messages; or
                messages.

        Raises:
            DataError: messages follow a prompt that is a text, or the template refuses them.
        """
        if self.template is None:
            if not isinstance(reply, str):
                raise DataError("messages follow a prompt that is a text; reply with a text")
            return tokenizer.encode(reply).tolist()
        replies = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
        messages, tools = self.row["prompt"], self.row.get("tools")
        return self.template.encode_replies(tokenizer, messages, replies, tools=tools)


def read_prompts(place: str, config: RunConfig, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Reads prompts. A text is encoded as the beginning of a document; messages are rendered with
    the start model's chat template, with the row's ``tools``.

    Args:
        place: file, directory or glob, such as ``rl.prompts``.

    Raises:
        DataError: a row has no prompt, or a prompt with ``max_new_tokens`` exceeds
            ``training.sequence_length``.
    """
    assert config.rl is not None
    room = config.training.sequence_length + 1 - config.rl.max_new_tokens
    source, found, template = scan(place), [], None
    begin = tokenizer.prefix_ids or (tokenizer.bos_id,)
    for name in source.names:
        for document in read_documents(source.root / name, name=name, text_field=None):
            where = document.name
            row = parse_json(document.text, where=where, error=DataError, remedy=EACH_LINE)
            require_type(row, dict[str, Any], where=where, error=DataError)
            prompt, chat = row.get("prompt"), None
            if isinstance(prompt, str):
                ids, text = [*begin, *tokenizer.encode(prompt).tolist()], prompt
            elif prompt and is_of_type(prompt, list[dict[str, Any]]):
                template = chat = template or _template(config, where)
                ids = chat.encode(tokenizer, prompt, tools=row.get("tools"))
                text = str(prompt[-1].get("content", ""))
            else:
                raise DataError(
                    f"{where}: prompt={prompt!r:.60} is neither a text nor a list of messages; "
                    "each row has one of them in its field 'prompt'"
                )
            if len(ids) > room:
                raise DataError(
                    f"{where}: a prompt of {len(ids)} tokens, and training.sequence_length="
                    f"{config.training.sequence_length} leaves {room} beside rl.max_new_tokens="
                    f"{config.rl.max_new_tokens}; raise the first, or leave the prompt out"
                )
            found.append(Prompt(ids=tuple(ids), text=text, row=row, template=chat))
    if not found:
        raise DataError(f"prompts {place!r} have no rows; give at least one, with a field 'prompt'")
    return tuple(found)


def checksum(prompts: Sequence[Prompt]) -> int:
    """Returns a number that other prompts, or rows that a reward reads, most likely change."""
    rows = [[each.ids, each.row] for each in prompts]
    return zlib.crc32(json.dumps(rows, sort_keys=True, default=str).encode())


def _template(config: RunConfig, where: str) -> ChatTemplate:
    if config.init is None:
        raise DataError(
            f"{where}: messages need a chat template, and the run starts from no model; give init, "
            "or prompts that are texts"
        )
    return load_chat_template(Path(config.init.path)).with_settings(config.data.template_settings)


def prompts_of(prompts: Sequence[Prompt], *, first: int, count: int, seed: int) -> list[Prompt]:
    """Returns consecutive prompts of the endless order: in each epoch another permutation.

    Args:
        first: number of the first one since the start of the run.
        seed: equal seeds give equal orders.
    """
    found, order, epoch = [], np.empty(0, np.int64), -1
    for number in range(first, first + count):
        if number // len(prompts) != epoch:
            epoch = number // len(prompts)
            order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        found.append(prompts[order[number % len(prompts)]])
    return found
