"""Between what clients send and what the engine takes: tokens, templates, limits, tickets."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, final

from jaxinfra.data.chat import check_message
from jaxinfra.data.chat_template import ChatTemplate, load_chat_template
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.grammar import GrammarCompiler
from jaxinfra.serving.engine.requests import GenerationRequest, RequestProgress
from jaxinfra.serving.http.bodies import GenerationBody
from jaxinfra.serving.http.deliveries import Deliveries
from jaxinfra.serving.http.metrics import EngineMetrics
from jaxinfra.serving.load import LoadedModel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """Limits of what clients may ask for."""

    max_new_tokens: int | None = None  # of an answer; None: what the context holds
    max_continuations: int = 128  # of one call: prompts times n
    max_body_bytes: int = 8 << 20
    special_tokens_in_prompts: bool = True  # spelled out in a prompt, they are tokens
    uses_defaults: bool = True  # of sampling, that the model's generation_config.json names


@final
class Service:
    """One model, its tokenizer and its engine.

    Args:
        path: the model's directory, with its chat template if it has one.
        name: what clients call it.
    """

    def __init__(
        self,
        model: LoadedModel,
        engine: EngineThread,
        *,
        path: Path,
        name: str,
        limits: ServiceLimits,
    ):
        self.name, self.limits, self.engine = name, limits, engine
        self.created = int(time.time())
        self.tokenizer = model.tokenizer
        self.eos_ids = frozenset(model.tokenizer.end_ids)
        self._model = model
        self.metrics = EngineMetrics(engine, model=name)
        self._template: ChatTemplate | None = None
        self.no_chat = ""
        try:
            self._template = load_chat_template(path)
        except ConfigError as error:
            self.no_chat = str(error)
        self._compiler: GrammarCompiler | None = None
        self._deliveries: Deliveries | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may ask for: the model and its adapters."""
        return (self.name, *self.engine.engine.adapters)

    @property
    def context(self) -> int:
        """Tokens that a request can have."""
        return self.engine.engine.limits.context

    def encode(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Tokens of a prompt, as the beginning of a document.

        Args:
            special: begin it as texts begin.
        """
        if not isinstance(prompt, str):
            return tuple(prompt)
        spelled_out = self.limits.special_tokens_in_prompts
        if special:
            return tuple(self._model.prompt(prompt, spelled_out=spelled_out))
        encode = self.tokenizer.encode_rendered if spelled_out else self.tokenizer.encode_batch
        return tuple(encode([prompt])[0].tolist()) or (self.tokenizer.bos_id,)

    def spelled(self, tokens: Sequence[int]) -> str:
        """The text of tokens; raises DataError where the tokenizer has no such token."""
        most = self.tokenizer.vocab_size
        if any(not 0 <= token < most for token in tokens):
            raise DataError(f"token ids {min(tokens)}..{max(tokens)} are not all in 0..{most - 1}")
        return self.tokenizer.decode(tokens)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[int, ...]:
        """Tokens of a conversation, in the model's chat template."""
        if self._template is None:
            raise ConfigError(self.no_chat)
        for number, message in enumerate(messages):
            check_message(message, where=f"messages[{number}]")
        return tuple(self._template.encode(self.tokenizer, messages, tools=tools))

    def requests(
        self,
        prompts: Sequence[tuple[int, ...]],
        body: GenerationBody,
        *,
        model: str,
        default_tokens: int,
        scores_prompt: bool = False,
    ) -> list[GenerationRequest]:
        """Makes the engine's requests: ``n`` continuations of every prompt, in this order.

        Raises:
            DataError, ConfigError: what is wrong with one of them, with its numbers.
        """
        if not prompts:
            raise DataError("the list of prompts is empty; send one at least")
        wanted = body.n * len(prompts)
        if wanted > self.limits.max_continuations:
            raise ConfigError(
                f"n={body.n} of {len(prompts)} prompts are {wanted} continuations; this server "
                f"takes {self.limits.max_continuations} in a call"
            )
        new = default_tokens if body.max_tokens is None else body.max_tokens
        if self.limits.max_new_tokens is not None and new > self.limits.max_new_tokens:
            if body.max_tokens is not None:
                raise ConfigError(
                    f"max_tokens={new} exceeds {self.limits.max_new_tokens}, the most that this "
                    "server gives"
                )
            new = self.limits.max_new_tokens
        sampling = body.sampling(self._model.defaults if self.limits.uses_defaults else {})
        structure = None if body.response_format is None else body.response_format.structure
        seed = secrets.randbits(32) if body.seed is None else body.seed % 2**32
        result = []
        for prompt in prompts:
            if len(prompt) > self.context:
                raise DataError(
                    f"the prompt has {len(prompt)} tokens, and the model's context is "
                    f"{self.context} tokens; shorten it"
                )
            for choice in range(body.n):
                constraint = None
                if structure is not None:
                    constraint = self._grammars.compile(*structure)
                result.append(
                    GenerationRequest(
                        prompt_ids=prompt,
                        max_new_tokens=max(new, 1),
                        sampling=sampling,
                        seed=seed,
                        choice=choice,
                        eos_ids=frozenset() if body.ignore_eos else self.eos_ids,
                        stop_ids=frozenset(body.stop_token_ids),
                        stop=body.stops,
                        constraint=constraint,
                        adapter=None if model == self.name else model,
                        scores_prompt=scores_prompt,
                    )
                )
        return result

    @property
    def _grammars(self) -> GrammarCompiler:
        if self._compiler is None:
            engine = self.engine.engine
            self._compiler = GrammarCompiler(
                self.tokenizer, num_ids=engine.num_ids, eos_ids=self.eos_ids
            )
        return self._compiler

    def _deliveries_of(self, loop: asyncio.AbstractEventLoop) -> Deliveries:
        if self._deliveries is None or self._deliveries.loop is not loop:
            self._deliveries = Deliveries(loop)
        return self._deliveries

    async def stream(
        self, requests: list[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, RequestProgress]]:
        """What comes of requests as it comes, by their places among these.

        Who stops to listen cancels those that have not ended. Requests are handed over at the
        first value asked for, where overload raises.
        """
        queue, deliveries = asyncio.Queue(), self._deliveries_of(asyncio.get_running_loop())

        def listen(place: int, progress: RequestProgress) -> None:
            deliveries.put(queue, (place, progress))

        begun = time.perf_counter()
        tickets = self.engine.submit(requests, listen)
        last: dict[int, float] = {}
        drawn = dict.fromkeys(range(len(requests)), 0)
        try:
            while drawn:
                place, progress = await queue.get()
                now = time.perf_counter()
                if progress.tokens:
                    if place in last:
                        self.metrics.next_token(now - last[place])
                    else:
                        self.metrics.first_token(now - begun)
                    last[place] = now
                    drawn[place] += len(progress.tokens)
                if progress.end is not None:
                    prompt = len(requests[place].prompt_ids)
                    new = drawn.pop(place)
                    self.metrics.ended(now - begun, prompt_tokens=prompt, new_tokens=new)
                yield place, progress
        finally:
            if drawn:
                self.engine.cancel([tickets[place] for place in drawn])
