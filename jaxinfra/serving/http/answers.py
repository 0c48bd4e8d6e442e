"""Builds answers in the format of OpenAI's API, as one body or as a stream of events."""

import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, final

import prometheus_client
from fastapi import responses
from prometheus_client.registry import CollectorRegistry
from pydantic import TypeAdapter

from jaxinfra.data.tokenizer import StreamDecoder, Tokenizer
from jaxinfra.serving.engine.requests import (
    EndReason,
    GenerationRequest,
    RequestProgress,
    TokenScore,
)
from jaxinfra.serving.http.bodies import GenerationBody

type ProgressBatches = AsyncIterator[Sequence[tuple[int, RequestProgress]]]
"""Lists of (request's index, progress): each has all progress since the list before it."""

FINISH = {
    EndReason.EOS: "stop",
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.CONTEXT: "length",
    EndReason.CANCELLED: "abort",
}
"""Names of the reasons why answers end, as OpenAI's API has them."""


class GenerationFailedError(Exception):
    """The engine failed to finish a request, for example because logits were not finite."""


@final
@dataclasses.dataclass(kw_only=True, slots=True)
class Usage:
    """Counts of the prompt, cached and new tokens of an HTTP request."""

    prompts: Sequence[tuple[int, ...]]
    n: int = 1  # continuations of each prompt
    cached: dict[int, int] = dataclasses.field(default_factory=dict)  # tokens by prompt
    new: int = 0

    def count(self, place: int, progress: RequestProgress) -> None:
        """Counts the tokens of a step's progress for one request, given by its index."""
        self.new += len(progress.tokens)
        if place % self.n == 0:  # what further continuations share, this one computed
            self.cached[place] = progress.num_cached

    def body(self, *, reasoning: int | None = None) -> dict[str, Any]:
        """Returns the ``usage`` object of OpenAI's API.

        Args:
            reasoning: new tokens that are reasoning; None: an endpoint without reasoning.
        """
        details = {} if reasoning is None else {"reasoning_tokens": reasoning}
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.new,
            "total_tokens": prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            **({"completion_tokens_details": details} if details else {}),
        }


@final
@dataclasses.dataclass(kw_only=True, slots=True)
class ChoicePart:
    """Text, tokens and scores of one choice of an answer, or of the piece in one event."""

    text: str = ""
    finish: str | None = None
    prompt: tuple[int, ...] = ()  # prompt tokens that precede the sampled ones
    tokens: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)

    def add(self, progress: RequestProgress) -> None:
        """Appends the text, tokens and scores of a step's progress."""
        self.text += progress.text
        self.tokens += progress.tokens
        self.scores += progress.scores
        self.prompt_scores += progress.prompt_scores
        if progress.end is not None:
            self.finish = FINISH[progress.end]


class AnswerForm:
    """Formats an endpoint's answers as JSON; each endpoint has a subclass, which is final."""

    prefix: str
    whole: str
    chunk: str

    def __init__(
        self,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        body: GenerationBody,
        *,
        tokenizer: Tokenizer,
    ):
        self._body, self._prompts, self._tokenizer = body, prompts, tokenizer
        self._last: dict[int, int] = {}  # of each choice, the last token
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        """Returns the JSON object of a finished choice, given its index."""
        raise NotImplementedError

    def pieces(self, index: int, part: ChoicePart, *, is_first: bool) -> list[dict[str, Any]]:
        """Returns the JSON objects of a choice in the events of one step of a stream."""
        raise NotImplementedError

    def extra_fields(self) -> dict[str, Any]:
        """Returns top-level fields of the answer besides its choices; none by default."""
        return {}

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the answer that are reasoning; None without reasoning."""
        return None

    def before(self, index: int) -> ChoicePart:
        """Returns the text and tokens that precede a choice's sampled ones; none by default."""
        del index
        return ChoicePart()

    async def at_once(
        self, requests: list[GenerationRequest], batches: ProgressBatches
    ) -> dict[str, Any]:
        """Waits for all requests, and returns the whole answer's JSON body.

        Raises:
            GenerationFailedError: the engine failed to finish one of the requests.
        """
        usage = Usage(prompts=self._prompts, n=self._body.n)
        parts = [self.before(index) for index in range(len(requests))]
        async for arrived in batches:
            for place, came in arrived:
                progress = self._wanted(came)
                usage.count(place, progress)
                if progress.end is EndReason.ERROR:
                    raise GenerationFailedError(progress.error)
                parts[place].add(progress)
        choices = [self.choice(index, part) for index, part in enumerate(parts)]
        counts = usage.body(reasoning=self.reasoning_tokens)
        body = {"object": self.whole, "choices": choices, "usage": counts}
        return self._head | body | self.extra_fields()

    async def events(self, batches: ProgressBatches) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events: one per piece of text, then the end.

        A choice's tokens that came at a time are one piece; pieces of one time are one value.
        """
        usage, begun = Usage(prompts=self._prompts, n=self._body.n), set[int]()
        options = self._body.stream_options
        head = self._head | {"object": self.chunk}
        async for arrived in batches:
            parts: dict[int, ChoicePart] = {}
            for place, came in arrived:
                progress = self._wanted(came)
                usage.count(place, progress)
                if progress.end is EndReason.ERROR:
                    error = error_body(progress.error or "", kind="server_error")
                    yield b"".join([*self._pieces(parts, begun, head), event({"error": error})])
                    return
                if (part := parts.get(place)) is None:
                    part = parts[place] = self.before(place) if place not in begun else ChoicePart()
                part.add(progress)
            if told := self._pieces(parts, begun, head):
                yield b"".join(told)
        if options is not None and options.include_usage:
            counts = usage.body(reasoning=self.reasoning_tokens)
            yield event(head | {"choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"

    def _pieces(
        self, parts: Mapping[int, ChoicePart], begun: set[int], head: Mapping[str, Any]
    ) -> list[bytes]:
        """Returns the events of choices' new parts; adds those that begin to ``begun``."""
        told = []
        for place, part in parts.items():
            is_first = place not in begun
            # Tokens within a character have no text yet.
            has_ids = self._body.return_token_ids and bool(part.tokens)
            if part.text or part.finish or part.scores or has_ids or is_first:
                begun.add(place)
                extra = self.extra_fields() if is_first else {}
                for choice in self.pieces(place, part, is_first=is_first):
                    told.append(event({**head, "choices": [choice], **extra}))
        return told

    def _wanted(self, progress: RequestProgress) -> RequestProgress:
        """Drops the sampled token if the client asked for none: the engine samples at least one."""
        if self._body.max_tokens != 0 or progress.end is EndReason.ERROR:
            return progress
        end = None if progress.end is None else EndReason.LENGTH
        return progress._replace(tokens=(), text="", scores=(), end=end)

    def prompt_logprobs(
        self, prompt: Sequence[int], part: ChoicePart
    ) -> list[dict[str, dict[str, Any]] | None]:
        """Returns ``prompt_logprobs`` as in vLLM: per prompt token, log-probabilities by id."""
        most = self._body.prompt_logprobs or 0
        result: list[dict[str, dict[str, Any]] | None] = [None]
        pairs = itertools.pairwise(prompt)
        for (before, token), score in zip(pairs, part.prompt_scores, strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(score.top, start=1)}
            likely = dict(score.top[:most]) | {token: score.logprob}
            result.append(
                {
                    str(each): {
                        "logprob": value,
                        "rank": ranks.get(each),  # null beyond those that were asked for
                        "decoded_token": self._tokenizer.spelled(each, before),
                    }
                    for each, value in likely.items()
                }
            )
        return result

    def tokens_before(self, index: int, part: ChoicePart) -> list[int | None]:
        """Returns the token before each token of a choice's next part; None before the prompt."""
        tokens = [*part.prompt, *part.tokens]
        last = (
            None if part.prompt else self._last.get(index, self._prompts[index // self._body.n][-1])
        )
        if tokens:
            self._last[index] = tokens[-1]
        return [last, *tokens][: len(tokens)]

    def _named(self, scores: Sequence[tuple[int, float]], before: int | None) -> dict[str, float]:
        """Maps tokens to distinct texts; tokens of equal text are told apart by their ids."""
        found: dict[str, float] = {}
        for token, value in scores:
            text = self._tokenizer.spelled(token, before)
            found[f"token_id:{token}" if text in found else text] = value
        return found


@final
class CompletionForm(AnswerForm):
    """Formats answers of ``/v1/completions``.

    Args:
        echoes: texts of the prompts, to be put before the answers; None: answers only.
        silent_ids: sampled tokens that add no text.
    """

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        body: GenerationBody,
        *,
        tokenizer: Tokenizer,
        echoes: Sequence[str] | None,
        silent_ids: Collection[int] = (),
    ):
        super().__init__(model, prompts, body, tokenizer=tokenizer)
        self._echoes, self._silent = echoes, silent_ids
        # Of each choice, the text so far: how it goes on, and its length.
        self._texts: dict[int, tuple[StreamDecoder, int]] = {}

    def before(self, index: int) -> ChoicePart:
        """Returns the prompt if the request asked for it (``echo``), else nothing."""
        if self._echoes is None:
            return ChoicePart()
        place = index // self._body.n
        return ChoicePart(text=self._echoes[place], prompt=self._prompts[place])

    def choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        """Returns the JSON object of a finished choice, given its index."""
        told = None if self._body.num_scores is None else self._logprobs(index, part)
        finish = part.finish
        body: dict[str, Any] = {"index": index, "text": part.text, "logprobs": told}
        body["finish_reason"] = finish
        prompt = self._prompts[index // self._body.n]
        if self._body.return_token_ids:
            body |= {"prompt_token_ids": prompt, "token_ids": part.tokens}
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs(prompt, part)
        return body

    def pieces(self, index: int, part: ChoicePart, *, is_first: bool) -> list[dict[str, Any]]:
        """Returns the JSON objects of a choice in the events of one step of a stream."""
        return [self.choice(index, part)]

    def _logprobs(self, index: int, part: ChoicePart) -> dict[str, Any]:
        """Returns the ``logprobs`` object, lists over tokens; a prompt's first token has none."""
        tokens = [*part.prompt, *part.tokens]
        told = [*(part.prompt_scores if part.prompt else ()), *part.scores]
        scores = [*[None] * (len(tokens) - len(told)), *told]
        most, before = self._body.num_scores, self.tokens_before(index, part)
        return {
            "tokens": [*map(self._tokenizer.spelled, tokens, before)],
            "token_logprobs": [None if each is None else each.logprob for each in scores],
            "top_logprobs": [
                None if each is None else self._named(_likely(each, token, most), last)
                for each, token, last in zip(scores, tokens, before, strict=True)
            ],
            "text_offset": self._offsets(index, part),
        }

    def _offsets(self, index: int, part: ChoicePart) -> list[int]:
        """Returns where each token, or the character it is part of, begins in a choice's text."""
        place = index // self._body.n
        prompt = self._prompts[place]
        if index in self._texts:
            decoder, length = self._texts[index]
        elif self._echoes is None:
            decoder, length = StreamDecoder(self._tokenizer, prompt), 0
        else:
            whole = self._tokenizer.decode(prompt)
            decoder, length = (
                StreamDecoder(self._tokenizer),
                len(self._echoes[place]) - len(whole),
            )
        offsets = []
        for i, token in enumerate([*part.prompt, *part.tokens]):
            offsets.append(max(length, 0))
            if i < len(part.prompt) or token not in self._silent:
                length += len(decoder.push(token))
        self._texts[index] = decoder, length
        return offsets


def _likely(score: TokenScore, token: int, most: int | None) -> Sequence[tuple[int, float]]:
    """Returns the most likely tokens, and the token itself behind them if it is not among them."""
    top = score.top[:most]
    return top if token in dict(top) else (*top, (token, score.logprob))


_BODY: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])  # a tenth of json.dumps's time


def event(body: dict[str, Any]) -> bytes:
    """Formats a JSON body as a server-sent event."""
    return b"data: %b\n\n" % _BODY.dump_json(body)


def error_body(message: str, *, kind: str, code: str | None = None) -> dict[str, Any]:
    """Returns an error's JSON body in the format that OpenAI's clients expect."""
    return {"message": message, "type": kind, "param": None, "code": code}


def error_response(
    status: int,
    message: str,
    *,
    kind: str,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> responses.Response:
    """Returns the HTTP response that reports an error to a client."""
    # The type is what Anthropic's clients expect.
    body = {"type": "error", "error": error_body(message, kind=kind, code=code)}
    return responses.JSONResponse(body, status_code=status, headers=headers)


def metrics_response(registry: CollectorRegistry) -> responses.Response:
    """Returns the HTTP response with all of a registry's metrics in Prometheus's text format."""
    text = prometheus_client.generate_latest(registry)
    return responses.Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
