"""Formats answers of ``/v1/chat/completions``: text, reasoning and calls, whole or streamed."""

import collections
from typing import Any, final

from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.serving.http.answers import AnswerForm, ChoicePart
from jaxinfra.serving.http.bodies import ChatBody
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.http.items import AnswerItem, AnswerItems, ChangeKind, ItemChange
from jaxinfra.serving.tools.reader import PieceKind

_TEXTS = {PieceKind.TEXT: "content", PieceKind.REASONING: "reasoning_content"}


@final
class ChatForm(AnswerForm):
    """Formats answers of ``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, turn: ChatTurn, body: ChatBody, *, tokenizer: Tokenizer):
        super().__init__(model, [turn.prompt], body, tokenizer=tokenizer)
        self._items: collections.defaultdict[int, AnswerItems] = collections.defaultdict(
            lambda: AnswerItems(turn)
        )
        self._prompt_part: ChoicePart | None = None

    def choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        """Returns the JSON object of a finished choice, given its index."""
        items = self._items[index]
        items.take(part.text, part.finish)
        self._prompt_part = self._prompt_part or part
        message: dict[str, Any] = {"role": "assistant"}
        texts = {
            key: "\n".join(each.text for each in items.of(kind)) for kind, key in _TEXTS.items()
        }
        message["content"] = texts["content"] or (None if items.items else "")
        if texts["reasoning_content"]:
            message["reasoning_content"] = texts["reasoning_content"]
        if items.calls:
            message["tool_calls"] = [_call(each, each.text) for each in items.calls]
        return self._wrapped(index, part) | {"message": message}

    def pieces(self, index: int, part: ChoicePart, *, is_first: bool) -> list[dict[str, Any]]:
        """Returns the JSON objects of a choice in the events of one step of a stream."""
        changes = self._items[index].take(part.text, part.finish)
        deltas = [found for each in changes if (found := _delta(each))]
        if is_first:
            deltas[:1] = [{"role": "assistant"} | (deltas[0] if deltas else {"content": ""})]
        if not deltas and (part.finish or part.scores or self._body.return_token_ids):
            deltas = [{}]
        # The step's tokens and its end go with its last event.
        waiting = [
            {"index": index, "logprobs": None, "finish_reason": None, "delta": delta}
            for delta in deltas[:-1]
        ]
        last = [self._wrapped(index, part) | {"delta": delta} for delta in deltas[-1:]]
        return waiting + last

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of all choices that are reasoning."""
        return sum(each.reasoning_tokens for each in self._items.values())

    def extra_fields(self) -> dict[str, Any]:
        """Returns the prompt's tokens and log-probabilities, if the request asked for them."""
        body, (prompt,), fields = self._body, self._prompts, {}
        if body.return_token_ids:
            fields["prompt_token_ids"] = prompt
        if body.prompt_logprobs is not None and self._prompt_part is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs(prompt, self._prompt_part)
        return fields

    def _wrapped(self, index: int, part: ChoicePart) -> dict[str, Any]:
        told, most = None, self._body.num_scores
        if most is not None:
            before = self.tokens_before(index, part)
            told = {
                "content": [
                    self._scored(token, score.logprob, last)
                    | {"top_logprobs": [self._scored(*each, last) for each in score.top[:most]]}
                    for token, score, last in zip(part.tokens, part.scores, before, strict=True)
                ]
            }
        finish = "tool_calls" if part.finish == "stop" and self._items[index].calls else part.finish
        body = {"index": index, "logprobs": told, "finish_reason": finish}
        return body | ({"token_ids": part.tokens} if self._body.return_token_ids else {})

    def _scored(self, token: int, logprob: float, before: int | None) -> dict[str, Any]:
        data = [*self._tokenizer.token_bytes(token, before)]
        text = self._tokenizer.spelled(token, before)
        return {"token": text, "logprob": logprob, "bytes": data}


def _call(item: AnswerItem, arguments: str) -> dict[str, Any]:
    function = {"name": item.name, "arguments": arguments}
    return {"id": item.id, "type": "function", "function": function}


def _delta(change: ItemChange) -> dict[str, Any] | None:
    """Returns the delta of a change; None where there is nothing to tell."""
    item = change.item
    match change.kind, item.kind:
        case ChangeKind.OPENED, PieceKind.CALL:
            return {"tool_calls": [{"index": item.place} | _call(item, "")]}
        case ChangeKind.GREW, PieceKind.CALL:
            function = {"arguments": change.text}
            return {"tool_calls": [{"index": item.place, "function": function}]}
        case ChangeKind.OPENED, _ if item.place:
            return {_TEXTS[item.kind]: "\n"}
        case ChangeKind.GREW, _:
            return {_TEXTS[item.kind]: change.text}
    return None
