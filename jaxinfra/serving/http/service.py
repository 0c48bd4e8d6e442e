"""Translates clients' requests into the engine's (tokens, templates, limits); serves ``/metrics``.

Metrics have the names that dashboards for vLLM expect. The engine's thread passes progress to
queues of the event loop.
"""

import asyncio
import bisect
import collections
import dataclasses
import functools
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from jaxinfra.data.special_tokens import named_tokens, read_settings
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.serving.adapter_bank import AdapterBank, read_adapters
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.grammar import GrammarCompiler
from jaxinfra.serving.engine.requests import Constraint, GenerationRequest, RequestProgress
from jaxinfra.serving.engine.token_rules import TokenRules
from jaxinfra.serving.http.bodies import GenerationBody
from jaxinfra.serving.http.chat import Chat, ChatTurn
from jaxinfra.serving.load import LoadedModel


@final
class Mailbox[T]:
    """Values for one task of an event loop, which takes all that wait at a time.

    Args:
        loop: the event loop, in which alone the mailbox is used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._values: list[T] = []
        self._taker: asyncio.Future[None] | None = None

    def put(self, value: T) -> None:
        """Adds a value, and wakes the task that waits for one."""
        self._values.append(value)
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self) -> list[T]:
        """Returns all values since the last call, in order; waits for one if there is none."""
        while not self._values:
            self._taker = self._loop.create_future()
            await self._taker
        values, self._values = self._values, []
        return values


@final
class Deliveries:
    """Puts values into mailboxes from other threads, waking the event loop once for many.

    Args:
        loop: event loop that reads the mailboxes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._waiting: collections.deque[tuple[Mailbox[Any], Any]] = collections.deque()
        self._is_called = False

    def put[T](self, mailbox: Mailbox[T], value: T) -> None:
        """Adds a value to a mailbox, in order; callable from any thread."""
        self._waiting.append((mailbox, value))
        # Who finds the loop called has put a value there before the loop looks.
        if not self._is_called:
            self._is_called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False
        while self._waiting:
            mailbox, value = self._waiting.popleft()
            mailbox.put(value)


_LATENCIES_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LENGTHS = tuple(2**n for n in range(0, 21, 2))


@final
class Histogram(Collector):
    """A Prometheus histogram that one thread fills, without the client library's locks.

    Args:
        bounds: upper bounds of the buckets, ascending; one without a bound follows.
        model: the served model's name, the label of every series.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *, model: str):
        self._name, self._text, self._bounds, self._model = name, text, bounds, model
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Yields the counts of values up to each bound, and the sum of values."""
        bounds = [*map(floatToGoString, (*self._bounds, math.inf))]
        buckets = [*zip(bounds, itertools.accumulate(self._counts), strict=True)]
        made = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        made.add_metric([self._model], buckets, self._sum)
        yield made


@final
class EngineMetrics:
    """Prometheus metrics: the engine's counts, and histograms of request latencies and lengths.

    Args:
        model: the served model's name, the label of every series.
    """

    def __init__(self, engine: EngineThread, *, model: str):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model))
        # Memory, files and CPU time of this process, by Prometheus's own names.
        prometheus_client.ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, buckets, model=model)
            self.registry.register(made)
            return made

        seconds = "Seconds from a request's arrival to"
        self.first_s = histogram(
            "time_to_first_token_seconds", f"{seconds} its first token.", _LATENCIES_S
        )
        self.between_s = histogram(
            "inter_token_latency_seconds", "Seconds between steps with tokens.", _LATENCIES_S
        )
        self.end_s = histogram("e2e_request_latency_seconds", f"{seconds} its end.", _LATENCIES_S)
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", _LENGTHS)
        self.new_tokens = histogram("request_generation_tokens", "Tokens of an answer.", _LENGTHS)


@final
class _EngineCollector(Collector):
    def __init__(self, engine: EngineThread, model: str):
        self._thread, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        engine = self._thread.engine
        scheduler, counts = engine.scheduler, engine.counts
        allocator, host, states = scheduler.allocator, scheduler.host, scheduler.snapshots
        used = allocator.num_in_use / allocator.num_usable
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that have pages.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Requests that wait for pages.", len(scheduler.waiting)),
            ("vllm:kv_cache_usage_perc", "Share of the pages that requests hold; 1: all.", used),
            ("vllm:gpu_cache_usage_perc", "The same by its older name.", used),
            ("jaxinfra:cached_pages", "Pages kept for prompts to come.", allocator.num_idle),
            ("jaxinfra:host_pages", "Pages of preempted requests on the host.", host.num_used),
        ):
            yield self._labelled(GaugeMetricFamily(name, text, labels=["model_name"]), value)
        late, preempted = engine.runner.programs.num_late, scheduler.num_preemptions
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("vllm:generation_tokens", "Tokens drawn.", counts.generated_tokens),
            ("vllm:num_preemptions", "Requests that gave up their pages.", preempted),
            ("vllm:prefix_cache_queries", "Tokens looked up among pages.", counts.prompt_tokens),
            ("vllm:prefix_cache_hits", "Tokens found among pages.", counts.cached_tokens),
            ("vllm:spec_decode_num_draft_tokens", "Tokens proposed.", counts.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.", counts.accepted_tokens),
            ("jaxinfra:host_pages_saved", "Pages copied to the host.", host.num_saved),
            ("jaxinfra:host_pages_restored", "Pages copied back from the host.", host.num_restored),
            ("jaxinfra:host_states_saved", "States copied to the host.", states.num_to_host),
            ("jaxinfra:host_states_restored", "States copied back.", states.num_from_host),
            ("jaxinfra:steps", "Steps of the engine.", counts.steps),
            ("jaxinfra:late_compiles", "Programs compiled while requests waited.", late),
        ):
            yield self._labelled(CounterMetricFamily(name, text, labels=["model_name"]), value)
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests ended.", labels=["model_name", "finished_reason"]
        )
        for reason, number in sorted(counts.ended.items()):
            ended.add_metric([self._model, str(reason)], number)
        yield ended

    def _labelled(self, metric: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        metric.add_metric([self._model], value)
        return metric


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """Limits on clients' requests: lengths, sizes and number of continuations."""

    max_new_tokens: int | None = None  # of an answer; None: what the context holds
    max_continuations: int = 128  # of one call: prompts times n
    max_body_bytes: int = 8 << 20
    special_tokens_in_prompts: bool = True  # spelled out in a prompt, they are tokens
    uses_defaults: bool = True  # of sampling, that the model's generation_config.json names
    tool_parser: str = "auto"  # form of tool calls; auto: as the chat template shows; none: text
    max_kept_responses: int = 1024  # of /v1/responses, for requests that go on with one
    reads_reasoning: bool = True  # reasoning is told apart from the answer


@final
class Service:
    """Serves one model with its tokenizer and engine to HTTP clients.

    Args:
        path: the model's directory, with a chat template if the model has one.
        name: the model's name in clients' requests.
        template: variables of the chat template, where a request gives no other value.
        bank: the model's adapters; None: it has none.
    """

    def __init__(
        self,
        model: LoadedModel,
        engine: EngineThread,
        *,
        path: Path,
        name: str,
        limits: ServiceLimits,
        template: Mapping[str, Any] | None = None,
        bank: AdapterBank | None = None,
    ):
        self.name, self.limits, self.engine = name, limits, engine
        self.created = int(time.time())
        self.tokenizer = model.tokenizer
        self.eos_ids = frozenset(model.tokenizer.end_ids)
        self._model, self._path, self._bank = model, path, bank
        self.metrics = EngineMetrics(engine, model=name)
        self.chat = Chat(
            path,
            model.tokenizer,
            template=template,
            tool_parser=limits.tool_parser,
            reads_reasoning=limits.reads_reasoning,
        )
        self._compiler: GrammarCompiler | None = None
        self._deliveries: Deliveries | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Model names that clients may request: the model and its adapters."""
        return (self.name, *self.engine.engine.adapters)

    def load_adapter(self, name: str, directory: Path) -> None:
        """Loads an adapter from a directory, and returns once requests may name it.

        Raises:
            ConfigError, DataError, CheckpointError: it is not an adapter of this model, or there is
                no place for it.
        """
        if name in self.names:
            raise ConfigError(f"{name!r} is served already; unload it first, or name it otherwise")
        assert self._bank is not None, "there are no places for adapters"
        adapters = read_adapters(self._model, self._path, directory)
        rows = self._bank.rows(self._model, adapters)
        engine = self.engine
        engine.between_steps(lambda: engine.engine.load_adapter(name, rows)).result()

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; raises ConfigError if it is not loaded or requests of it are open."""
        engine = self.engine
        engine.between_steps(lambda: engine.engine.unload_adapter(name)).result()

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters are loaded and unloaded by request."""
        return self._bank is not None and self._bank.num_free > 0

    @property
    def context(self) -> int:
        """Most tokens that a request can have, prompt and answer together."""
        return self.engine.engine.limits.context

    def encode(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Encodes a prompt as the beginning of a document; token ids are returned as they are.

        Args:
            special: put the tokens first that begin a document.
        """
        if not isinstance(prompt, str):
            return tuple(prompt)
        spelled_out = self.limits.special_tokens_in_prompts
        if special:
            return tuple(self._model.prompt(prompt, spelled_out=spelled_out))
        encode = self.tokenizer.encode_rendered if spelled_out else self.tokenizer.encode_batch
        return tuple(encode([prompt])[0].tolist())

    def spelled(self, tokens: Sequence[int]) -> str:
        """Decodes tokens into text; raises DataError if an id is outside the vocabulary."""
        most = self.tokenizer.vocab_size
        if any(not 0 <= token < most for token in tokens):
            raise DataError(f"token ids {min(tokens)}..{max(tokens)} are not all in 0..{most - 1}")
        return self.tokenizer.decode(tokens)

    def tokenizer_facts(self) -> dict[str, Any]:
        """Returns the settings in ``tokenizer_config.json``, with the special tokens that count."""
        ids = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        spelled = {name: self.spelled([number]) for name, number in ids.items()}
        settings = {"tokenizer_class": "jaxinfra"} | read_settings(self._path)
        return settings | named_tokens(self._path) | spelled

    def requests(
        self,
        prompts: Sequence[tuple[int, ...]],
        body: GenerationBody,
        *,
        model: str,
        default_tokens: int,
        scores_prompt: bool = False,
        turn: ChatTurn | None = None,
    ) -> list[GenerationRequest]:
        """Makes the engine's requests: ``n`` continuations per prompt, in the prompts' order.

        Args:
            scores_prompt: the prompt's tokens are scored too.
            turn: the conversation of the single prompt; None: prompts are plain texts.

        Raises:
            DataError, ConfigError: a request is invalid; the message has the numbers.
        """
        if not prompts:
            raise DataError("the list of prompts is empty; send one at least")
        wanted = body.n * len(prompts)
        if wanted > self.limits.max_continuations:
            raise ConfigError(
                f"n={body.n} of {len(prompts)} prompts are {wanted} continuations; this server "
                f"takes {self.limits.max_continuations} in a call"
            )
        new = self._length(body, default_tokens)
        sampling = body.sampling(self._model.defaults if self.limits.uses_defaults else {})
        seed = secrets.randbits(32) if body.seed is None else body.seed
        silent = self._silent(body, turn)
        result = []
        for prompt in prompts:
            if len(prompt) > self.context:
                raise DataError(
                    f"the prompt has {len(prompt)} tokens, and the model's context is "
                    f"{self.context} tokens; shorten it"
                )
            for _ in range(body.n):
                result.append(
                    GenerationRequest(
                        prompt_ids=prompt,
                        max_new_tokens=max(new, 1),
                        sampling=sampling,
                        seed=seed,
                        choice=len(result),  # equal prompts of one call get texts of their own
                        eos_ids=frozenset() if body.ignore_eos else self.eos_ids,
                        stop_ids=frozenset(body.stop_token_ids),
                        stop=body.stops,
                        constraint=self._constraint(body, turn),
                        adapter=None if model == self.name else model,
                        scores_prompt=scores_prompt or body.prompt_logprobs is not None,
                        keeps_stop=body.include_stop_str_in_output,
                        min_tokens=body.min_tokens,
                        silent_ids=silent,
                        cache_salt=body.cache_salt,
                    )
                )
        return result

    def _length(self, body: GenerationBody, default_tokens: int) -> int:
        """Returns the most tokens of an answer."""
        new = default_tokens if body.max_tokens is None else body.max_tokens
        most = self.limits.max_new_tokens
        if most is None or new <= most:
            return new
        if body.max_tokens is not None:
            raise ConfigError(f"max_tokens={new} exceeds {most}, the most that this server gives")
        return most

    def shortened(self, prompt: tuple[int, ...], body: GenerationBody) -> tuple[int, ...]:
        """Returns a prompt's last tokens, as many as ``truncate_prompt_tokens`` asks for."""
        wanted = body.truncate_prompt_tokens
        if wanted is None:
            return prompt
        if wanted > self.context:
            raise ConfigError(
                f"truncate_prompt_tokens={wanted} exceeds the context of {self.context} tokens"
            )
        most = self.context if wanted < 0 else wanted
        return prompt[max(len(prompt) - most, 0) :]

    def _silent(self, body: GenerationBody, turn: ChatTurn | None) -> frozenset[int]:
        """Special tokens that add no text, where the client wants none: all but marks of calls and
        reasoning, and those that its stop strings spell.
        """
        # Calls in a form that is not known may have any token in them.
        has_unread_calls = turn is not None and bool(turn.schemas) and turn.form is None
        if not body.skip_special_tokens or has_unread_calls:
            return frozenset()
        special = self.tokenizer.special_ids
        if body.stops:
            stops = "\n".join(body.stops)
            special = {each for each in special if self.tokenizer.spelled(each) not in stops}
        return frozenset(special) - self._marks

    @functools.cached_property
    def _marks(self) -> set[int | None]:
        """Tokens around calls and reasoning, as the model's chat template has them."""
        return {self.tokenizer.id_of(mark) for mark in self.chat.marks}

    def _constraint(self, body: GenerationBody, turn: ChatTurn | None) -> Constraint | None:
        """Makes the limit of one answer's tokens; None if any may come."""
        inner: Constraint | None = None
        if turn is not None and turn.structure is not None:
            inner = self.chat.constraint(turn, self._grammars)
        elif body.structure is not None:
            inner = self._grammars.compile(*body.structure)
        num_ids = self.engine.engine.num_ids
        beyond = [each for each in body.allowed_token_ids or () if not 0 <= each < num_ids]
        if beyond:
            raise ConfigError(
                f"allowed_token_ids {beyond[:4]} are not all in 0..{num_ids - 1}, the model's ids"
            )
        if not (body.allowed_token_ids or body.bad_words or body.min_tokens):
            return inner
        # A word is written alike at the start of a text and, with a space before it, within one.
        spellings = {f"{space}{word}" for word in body.bad_words for space in ("", " ")}
        words = [tuple(self.tokenizer.encode(each).tolist()) for each in sorted(spellings)]
        return TokenRules(
            inner,
            num_ids=num_ids,
            allowed_ids=body.allowed_token_ids,
            words=words,
            min_tokens=body.min_tokens,
            end_ids=[*self.eos_ids, *body.stop_token_ids],
        )

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
        self, requests: list[GenerationRequest], *, together: int = 1
    ) -> AsyncGenerator[Sequence[tuple[int, RequestProgress]]]:
        """Submits requests to the engine, and yields their indices and progress as it comes.

        Closing the generator cancels requests that have not ended. Requests are submitted when the
        first value is read, so OverloadError is raised there.

        Args:
            together: steps' progress that is yielded at a time, which takes less work, or what
                there is when a request ends.
        """
        loop = asyncio.get_running_loop()
        mailbox = Mailbox[list[tuple[int, RequestProgress, float]]](loop)
        deliveries = self._deliveries_of(loop)
        held: list[tuple[int, RequestProgress, float]] = []

        def listen(place: int, progress: RequestProgress) -> None:
            nonlocal held
            held.append((place, progress, time.perf_counter()))
            if len(held) >= together or progress.end is not None:
                told, held = held, []
                deliveries.put(mailbox, told)

        begun = time.perf_counter()
        tickets = self.engine.submit(requests, listen)
        last: dict[int, float] = {}
        drawn = dict.fromkeys(range(len(requests)), 0)
        try:
            while drawn:
                arrived = [*itertools.chain.from_iterable(await mailbox.take())]
                for place, progress, now in arrived:
                    if progress.tokens:
                        seconds = self.metrics.between_s if place in last else self.metrics.first_s
                        seconds.observe(now - last.get(place, begun))
                        last[place] = now
                        drawn[place] += len(progress.tokens)
                    if progress.end is not None:
                        self.metrics.end_s.observe(now - begun)
                        self.metrics.prompt_tokens.observe(len(requests[place].prompt_ids))
                        self.metrics.new_tokens.observe(drawn.pop(place))
                yield [each[:2] for each in arrived]
        finally:
            if drawn:
                self.engine.cancel([tickets[place] for place in drawn])
