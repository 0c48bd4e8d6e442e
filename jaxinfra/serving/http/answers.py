"""Answers in the shapes of OpenAI's API, whole and as streams of events."""

import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, final

from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress
from jaxinfra.serving.http.bodies import GenerationBody

type Given = AsyncIterator[tuple[int, RequestProgress]]

_FINISH = {
    EndReason.EOS: "stop",
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CONTEXT: "length",
    EndReason.CANCELLED: "abort",
}


class GenerationFailedError(Exception):
    """The engine could not go on with a request."""


@final
@dataclasses.dataclass(kw_only=True, slots=True)
class Usage:
    """Tokens that a call took."""

    prompts: Sequence[tuple[int, ...]]
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    new: int = 0

    def count(self, place: int, progress: RequestProgress) -> None:
        """Takes note of what came."""
        self.new += len(progress.tokens)
        self.cached[place] = progress.num_cached

    def body(self) -> dict[str, Any]:
        """As clients read it."""
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.new,
            "total_tokens": prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class AnswerForm:
    """How the texts of one endpoint are wrapped. Subclasses are final."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, model: str, prompts: Sequence[tuple[int, ...]], body: GenerationBody):
        self._body, self._prompts = body, prompts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def piece(self, index: int, text: str, finish: str | None, *, is_first: bool) -> dict[str, Any]:
        """A choice's part in one event."""
        raise NotImplementedError

    def before(self, index: int) -> str:
        """Text that a choice begins with, before what was drawn."""
        del index
        return ""

    async def at_once(self, requests: list[GenerationRequest], given: Given) -> dict[str, Any]:
        """The body of an answer, once all of it has come.

        Raises:
            GenerationFailedError: the engine could not go on with one of the requests.
        """
        usage = Usage(prompts=self._prompts)
        texts = [self.before(index) for index in range(len(requests))]
        finishes: list[str | None] = [None] * len(requests)
        async for place, progress in given:
            usage.count(place, progress)
            texts[place] += progress.text
            if progress.end is EndReason.ERROR:
                raise GenerationFailedError(progress.error)
            if progress.end is not None:
                finishes[place] = _FINISH[progress.end]
        both = enumerate(zip(texts, finishes, strict=True))
        choices = [self.choice(index, text, finish) for index, (text, finish) in both]
        return self._head | {"object": self.whole, "choices": choices, "usage": usage.body()}

    async def events(self, given: Given) -> AsyncIterator[str]:
        """The same as server-sent events, a piece of text each, and the end."""
        usage, begun = Usage(prompts=self._prompts), set()
        options = self._body.stream_options
        async for place, progress in given:
            usage.count(place, progress)
            if progress.end is EndReason.ERROR:
                yield event({"error": error_body(progress.error or "", kind="server_error")})
                return
            is_first = place not in begun
            text = (self.before(place) if is_first else "") + progress.text
            finish = None if progress.end is None else _FINISH[progress.end]
            if text or finish or is_first:
                begun.add(place)
                choice = self.piece(place, text, finish, is_first=is_first)
                yield event(self._head | {"object": self.chunk, "choices": [choice]})
        if options is not None and options.include_usage:
            yield event(self._head | {"object": self.chunk, "choices": [], "usage": usage.body()})
        yield "data: [DONE]\n\n"


@final
class CompletionForm(AnswerForm):
    """``/v1/completions``.

    Args:
        echoes: the prompts' texts, where they are to stand before their continuations.
    """

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        body: GenerationBody,
        *,
        echoes: Sequence[str] | None,
    ):
        super().__init__(model, prompts, body)
        self._echoes = echoes

    def before(self, index: int) -> str:
        """The prompt, where it was asked for."""
        return "" if self._echoes is None else self._echoes[index // self._body.n]

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A whole choice."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def piece(self, index: int, text: str, finish: str | None, *, is_first: bool) -> dict[str, Any]:
        """A choice's part in one event."""
        return self.choice(index, text, finish)


@final
class ChatForm(AnswerForm):
    """``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def piece(self, index: int, text: str, finish: str | None, *, is_first: bool) -> dict[str, Any]:
        """A choice's part in one event."""
        delta = ({"role": "assistant"} if is_first else {}) | {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_body(message: str, *, kind: str, code: str | None = None) -> dict[str, Any]:
    """What an error says, as OpenAI's clients read it."""
    return {"message": message, "type": kind, "param": None, "code": code}
