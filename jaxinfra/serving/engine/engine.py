"""The engine: takes requests, runs them one step at a time, and reports their tokens and text."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Self, final

import jax
import numpy as np
from flax import nnx

from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError, DataError, UnsupportedError
from jaxinfra.model.cache import recurrent_bytes
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import Parameters
from jaxinfra.serving.adapter_bank import AdapterBank, AdapterRow
from jaxinfra.serving.engine.fit import memory_limit
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.plan import RowSample, SchedulerLimits, StepPlan
from jaxinfra.serving.engine.programs import page_bytes
from jaxinfra.serving.engine.requests import (
    EndReason,
    GenerationRequest,
    RequestProgress,
    RequestStream,
    TokenScore,
)
from jaxinfra.serving.engine.runner import MOST_BIASES, Dispatched, ModelRunner, limits_that_fit
from jaxinfra.serving.engine.scheduler import Scheduler
from jaxinfra.serving.engine.text import TextStream, end_of, last_text, text_of
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.program_store import ProgramStore

MANY_ROWS = 256
"""Number of rows of a step from which the host plans two steps ahead of the device, not one."""

_LONGEST, _SHORTEST = 4, 2
_LOOKED_BACK = 4096  # tokens


@final
class NgramLookup:
    """Drafts the tokens that followed an earlier occurrence of a request's last n-gram.

    Prompt look-up decoding (Saxena 2023): the longest match of 4 to 2 tokens is used.
    """

    def __init__(self, *, num_drafts: int):
        self._num_drafts = num_drafts

    def __call__(self, stream: RequestStream) -> Sequence[int]:
        """Returns up to ``num_drafts`` draft tokens; none if the last tokens occur only once."""
        tokens = stream.tokens[-_LOOKED_BACK:]
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            end = tokens[-length:]
            if len(end) < length:
                continue
            last = length - 1
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start + last] == end[last] and tokens[start : start + length] == end:
                    return tokens[start + length : start + length + self._num_drafts]
        return ()


NOT_FINITE = (
    "the model's logits for this request are not finite; its weights or its tokens' embeddings "
    "hold such numbers, or its numbers overflow the compute dtype"
)

_NONE_ALLOWED = (
    "the request's rules leave no token that may come next: its structure, allowed ids and "
    "forbidden words exclude each other; allow an end token among them"
)


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Counts of steps, tokens and requests since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0  # prompt tokens of accepted requests
    cached_tokens: int = 0  # prompt tokens whose keys and values were cached already
    computed_tokens: int = 0  # input tokens of all steps, with recomputed tokens and drafts
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts that verification accepted
    ended: collections.Counter[EndReason] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Told:
    """Per-request state of the engine beside the scheduler's: text and prompt scores."""

    stream: RequestStream
    text: TextStream | None
    prompt_scores: list[TokenScore] = dataclasses.field(default_factory=list)


def _check_draft(model: Decoder, draft: Decoder) -> None:
    """Raises an error if a model cannot draft tokens for another."""
    if draft.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary is {draft.config.vocab_size}, the model's "
            f"{model.config.vocab_size}; draft with a model of the same tokenizer"
        )
    if any(block.mixer.cache.state for block in draft.config.blocks):
        raise UnsupportedError(
            "a draft model whose layers keep a state: rejected drafts would stay in it; draft with "
            "a model of attention alone, or without one (n-grams)"
        )


def _limits(options: EngineOptions, model: Decoder, draft: Decoder | None) -> SchedulerLimits:
    """Returns the scheduler's limits, as yet without regard to a device's memory."""
    limits = options.limits(
        model.config,
        has_draft=draft is not None,
        batch_shards=model.execution.place.batch_shards,
    )
    models = [(each.config, each.execution) for each in (model, draft) if each is not None]
    if draft is None and limits.num_drafts:
        models.append((model.config.mtp_part, model.execution))
    policy = model.execution.policy
    return options.with_host(
        limits,
        page_bytes=sum(page_bytes(*each, limits.page_size) for each in models),
        state_bytes=recurrent_bytes(
            model.config,
            accum=model.execution.state_dtype.itemsize,
            compute=policy.compute.itemsize,
        ),
    )


@final
class Engine:
    """Continuous batching of generation requests over one paged KV cache.

        engine = Engine(model, tokenizer=tokenizer)
        number = engine.submit(GenerationRequest(prompt_ids=ids, max_new_tokens=16))
        while engine.is_busy:
            for progress in engine.step():
                ...

    Only one thread may call it. A request's tokens do not depend on other requests, up to rounding.

    Args:
        tokenizer: needed for progress with text and for stop strings.
        num_ids: token ids from this one on are never sampled; by default all ids may be sampled.
        draft: a smaller model of the same vocabulary that drafts ``options.num_drafts`` tokens per
            step. Without one the model's multi-token prediction drafts or, if it has none, n-grams.
        adapters: names of the adapters in the model's bank (``AdapterBank.added_to``), in order;
            requests choose one by name.
        num_free_adapters: further adapters that the bank has room for.
        store: where compiled programs are kept; None: nowhere.
        limit_bytes: bytes that JAX may allocate on an absent device; None: as this one says.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        tokenizer: Tokenizer | None = None,
        num_ids: int | None = None,
        options: EngineOptions | None = None,
        draft: Decoder | None = None,
        adapters: Sequence[str] = (),
        num_free_adapters: int = 0,
        store: ProgramStore | None = None,
        limit_bytes: int | None = None,
    ):
        options = options or EngineOptions()
        self._num_adapters = len(adapters) + num_free_adapters
        self._reloads: dict[str, int] = {}  # of adapters that were loaded later, by name
        model.config.require_logits()
        self.vocab_size = model.config.vocab_size
        self.num_ids = self.vocab_size if num_ids is None else num_ids
        if not 1 <= self.num_ids <= self.vocab_size:
            raise ConfigError(f"num_ids={num_ids} must be in 1..{self.vocab_size}")
        if draft is not None:
            _check_draft(model, draft)
        self.tokenizer = tokenizer
        limits = _limits(options, model, draft)
        make_runner = functools.partial(
            ModelRunner,
            model,
            num_ids=self.num_ids,
            draft=draft,
            verify_length=1 + options.num_drafts if options.num_drafts else None,
            adapters=adapters,
            store=store,
        )
        is_loaded = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
        limit_bytes = memory_limit() if limit_bytes is None else limit_bytes
        self.limits = limits_that_fit(
            make_runner, limits, options, is_loaded=is_loaded, limit_bytes=limit_bytes
        )
        self._has_draft = draft is not None
        self._drafts_itself = draft is None and self.limits.num_drafts > 0
        self._is_fitted = self.limits.num_pages < limits.num_pages
        is_looked_up = options.num_drafts > self.limits.num_drafts
        self._lookup = NgramLookup(num_drafts=options.num_drafts) if is_looked_up else None
        self.scheduler = Scheduler(self.limits, propose=self._lookup)
        self.runner = make_runner(self.limits)
        if limit_bytes is not None:
            self.runner.limit_scratch(limit_bytes)
        if is_loaded:
            self.runner.attach(model, draft)
        self._numbers = itertools.count()
        self._requests: dict[int, _Told] = {}
        self._unadmitted: set[int] = set()
        self._unread: collections.deque[tuple[Dispatched, StepPlan]] = collections.deque()
        self._ended: list[RequestProgress] = []
        self.counts = EngineCounts()

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        *,
        options: EngineOptions | None = None,
        draft: LoadedModel | None = None,
        bank: AdapterBank | None = None,
        consumes: bool = False,
        limit_bytes: int | None = None,
    ) -> Self:
        """Makes an engine of a loaded model and its tokenizer, with weights in the fastest form.

        Args:
            consumes: free the given models' weights once the engine has its own form, so that none
                is held twice.
            bank: adapters that requests may name; projections are then not packed.
            limit_bytes: bytes that JAX may allocate on an absent device; None: as this one says.
        """
        if draft is not None or options is None or not options.num_drafts:
            model = model.without_mtp()
        return cls(
            model.serving_decoder(consumes=consumes) if bank is None else bank.added_to(model),
            adapters=() if bank is None else bank.names,
            num_free_adapters=0 if bank is None else bank.num_free,
            tokenizer=model.tokenizer,
            num_ids=model.num_ids,
            options=options,
            draft=None if draft is None else draft.serving_decoder(consumes=consumes),
            store=model.store,
            limit_bytes=limit_bytes,
        )

    def attach(self, model: LoadedModel, draft: LoadedModel | None = None) -> None:
        """Gives weights to an engine that was made from shapes only; the engine then owns them."""
        drafting = None if draft is None else draft.serving_decoder(consumes=True)
        self.runner.attach(self._served(model).serving_decoder(consumes=True), drafting)

    def _served(self, model: LoadedModel) -> LoadedModel:
        """Returns the model with those parts that the engine runs."""
        return model if self._drafts_itself else model.without_mtp()

    def release(self) -> None:
        """Frees weights and pages until ``renew``; compiled programs stay.

        Raises:
            ConfigError: requests are running, or the engine drafts with a second model.
        """
        if self.is_busy:
            raise ConfigError("release of an engine with requests: let them end, or cancel them")
        if self._has_draft:
            raise ConfigError("release of an engine with a draft model, whose weights would be old")
        self.scheduler = Scheduler(self.limits, propose=self._lookup)
        self._numbers = itertools.count()
        self.runner.release()

    def renew(self, parameters: Parameters) -> None:
        """Replaces the weights by ``parameters``, as ``ModelDefinition.bind`` takes them. Compiled
        programs stay; cached keys and values are dropped. What follows depends on no request
        before.

        Weights that the serving form takes as they are are not copied, so their owner must not free
        them before the requests that follow have ended.

        Raises:
            ConfigError: requests are running, or the engine drafts with a second model.
        """
        self.release()
        self.runner.renew(parameters)

    def has_room(self, max_running: int, context: int) -> bool:
        """Returns whether ``max_running`` requests of ``context`` tokens each can run at a time."""
        pages = -(-context // self.limits.page_size) * max_running
        limits = self.limits
        return (
            limits.max_running >= max_running
            and limits.context >= context
            and (limits.num_pages > pages or self._is_fitted)
        )

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished or has progress that ``step`` has not returned yet."""
        return bool(self._requests or self._unread or self._ended)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program that a step may need, so that no request waits for compilation."""
        self.runner.warm_up(progress)

    def check(self, request: GenerationRequest) -> None:
        """Checks a request, and raises the DataError or ConfigError that ``submit`` would raise."""
        # One pass over a long prompt, by C.
        ids = np.fromiter(request.prompt_ids, np.int64, len(request.prompt_ids))
        if not ids.size:
            raise DataError("the prompt has no tokens; begin it with the document separator")
        if ids.size > self.limits.context:
            raise DataError(
                f"the prompt has {ids.size} tokens, more than the {self.limits.context} positions "
                "that a request can have here; shorten it"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise DataError(
                f"the prompt has token ids {ids.min()}..{ids.max()}, the model's vocabulary is "
                f"0..{self.vocab_size - 1}; encode it with the model's tokenizer"
            )
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise ConfigError(f"adapter {request.adapter!r} is not loaded; loaded: {known}")
        if request.scores_prompt and request.sampling.logprobs is None:
            raise ConfigError("scores_prompt needs sampling.logprobs: how many to report")
        biased = [token for token, _ in request.sampling.logit_bias]
        if len(biased) > MOST_BIASES or max(biased, default=0) >= self.num_ids:
            raise ConfigError(
                f"logit_bias of {len(biased)} ids up to {max(biased)}: at most {MOST_BIASES} ids "
                f"below {self.num_ids} can be given one"
            )
        stops = request.stop_ids
        if min(stops, default=0) < 0 or max(stops, default=0) >= self.num_ids:
            raise ConfigError(
                f"stop ids {min(stops)}..{max(stops)}: the model gives ids 0..{self.num_ids - 1}"
            )
        if request.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={request.max_new_tokens} must be at least 1")
        if not 0 <= request.seed < 2**63:
            raise ConfigError(f"seed={request.seed} must be in 0..2^63-1")
        if request.stop and self.tokenizer is None:
            raise ConfigError(
                "stop strings need text, and the engine has no tokenizer; give it one, or stop_ids"
            )
        if not all(request.stop):
            raise ConfigError("an empty stop string would end every text before it begins")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(name for name in self.runner.adapters if name is not None)

    def load_adapter(self, name: str, rows: Mapping[str, AdapterRow]) -> None:
        """Loads an adapter into a free place of the bank.

        Args:
            rows: the adapter of each projection in the bank (``AdapterBank.rows``).

        Raises:
            ConfigError: an adapter of this name is loaded, or no place is free.
        """
        known = self.runner.adapters
        if name in known:
            raise ConfigError(f"adapter {name!r} is loaded already; unload it first")
        free = {*range(1, 1 + self._num_adapters)} - {*known.values()}
        if not free:
            raise ConfigError(
                f"all {self._num_adapters} places of adapters are taken; unload one, or start the "
                "server with more --adapter-slots"
            )
        self.runner.load_adapter(name, rows, min(free))
        # Another one may have had this name: what it cached is not shared.
        self._reloads[name] = 1 + max(self._reloads.values(), default=0)

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter's place in the bank.

        Raises:
            ConfigError: no such adapter is loaded, or requests of it are open.
        """
        if name not in self.adapters:
            raise ConfigError(f"adapter {name!r} is not loaded; loaded: {list(self.adapters)}")
        requests = [told.stream.request for told in self._requests.values()]
        if count := sum(each.adapter == name for each in requests):
            raise ConfigError(f"{count} requests of adapter {name!r} are open; wait for their end")
        del self.runner.adapters[name]

    def submit(self, request: GenerationRequest) -> int:
        """Queues a request, and returns the number that identifies it in the progress of ``step``.

        Raises:
            DataError: the prompt is empty or too long, or has ids outside the vocabulary.
        """
        self.check(request)
        if (reload := self._reloads.get(request.adapter or "")) is not None:
            salt = f"{reload} {request.cache_salt or ''}"
            request = dataclasses.replace(request, cache_salt=salt)
        number = next(self._numbers)
        stream = RequestStream(
            number=number, request=request, tokens=[*request.prompt_ids], limit=0
        )
        text = None
        if self.tokenizer is not None:
            text = text_of(self.tokenizer, request)
        self.scheduler.add(stream)
        self._requests[number] = _Told(stream=stream, text=text)
        self._unadmitted.add(number)
        self.counts.prompt_tokens += len(request.prompt_ids)
        return number

    def cancel(self, number: int) -> None:
        """Ends a request and frees its pages at once; has no effect if the request has ended."""
        told = self._requests.get(number)
        if told is not None:
            self._ended.append(self._end(told, EndReason.CANCELLED))

    def step(self) -> list[RequestProgress]:
        """Dispatches the next step to the device, and returns the progress of the previous step.

        So the device computes a step while the host reads results and plans, if requests allow it.
        Behind a step of many rows one more waits for it, as the host's time for each differs.
        """
        result, self._ended = self._ended, []
        plan = self.scheduler.plan()
        if not plan.is_empty:
            masks = {
                row.slot: row.stream.request.constraint.mask()
                for row in plan.rows
                if row.is_sampled and row.stream.request.constraint is not None
            }
            self._unread.append((self.runner.dispatch(plan, masks), plan))
            self._count(plan)
        unread, ahead = len(self._unread), 1 + (len(plan.rows) >= MANY_ROWS)
        for _ in range(min(1, unread) if plan.is_empty else unread - ahead):
            dispatched, _ = self._unread.popleft()
            for drawn in self.runner.read(dispatched):
                progress = self._take(drawn)
                if progress is not None:
                    result.append(progress)
        return result

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[RequestProgress]]:
        """Runs requests until all have ended; returns each request's list of progress."""
        places = {self.submit(request): place for place, request in enumerate(requests)}
        result: list[list[RequestProgress]] = [[] for _ in requests]
        while self.is_busy:
            for progress in self.step():
                result[places[progress.request]].append(progress)
        return result

    def _count(self, plan: StepPlan) -> None:
        self.counts.steps += 1
        self.counts.computed_tokens += plan.num_tokens
        for row in plan.rows if self._unadmitted else ():
            if row.stream.number in self._unadmitted:
                self._unadmitted.remove(row.stream.number)
                self.counts.cached_tokens += row.stream.num_cached

    def _take(self, drawn: RowSample) -> RequestProgress | None:
        """Adds a row's sampled tokens to its request's progress; None if the request is over."""
        stream = drawn.row.stream
        told = self._requests.get(stream.number)
        if drawn.is_bad and told is not None:
            rules = stream.request.constraint
            is_excluded = rules is not None and not rules.mask().any()
            error = _NONE_ALLOWED if is_excluded else NOT_FINITE
            return self._end(told, EndReason.ERROR, error=error)
        if told is not None and drawn.prompt_scores:
            wanted = len(stream.request.prompt_ids) - 1 - len(told.prompt_scores)
            known = len(told.prompt_scores) - drawn.row.start  # some, if it was begun again
            if known >= 0:
                told.prompt_scores += drawn.prompt_scores[known : known + wanted]
        taken = self.scheduler.take(drawn.row, drawn.tokens, drawn.num_accepted)
        if told is None or not drawn.row.is_sampled:
            return None
        self.counts.drafted_tokens += drawn.row.num_drafts
        self.counts.accepted_tokens += drawn.num_accepted
        tokens, text = [], ""
        for place, token in enumerate(taken, start=1 - len(taken)):
            tokens.append(token)
            self.counts.generated_tokens += 1
            end, piece = self._meaning(told, token, after=-place)
            text += piece
            if end is not None:
                progress = self._end(told, end, tokens=tuple(tokens), text=text)
                return self._with_scores(progress, told, drawn)
        progress = RequestProgress(
            request=stream.number, tokens=tuple(tokens), text=text, num_cached=stream.num_cached
        )
        return self._with_scores(progress, told, drawn)

    def _with_scores(
        self, progress: RequestProgress, told: _Told, drawn: RowSample
    ) -> RequestProgress:
        if not drawn.scores:
            return progress
        prompt, told.prompt_scores = tuple(told.prompt_scores), []
        # Not by the tokens there are now: drafts may be accepted with the first one.
        is_first = drawn.row.context - drawn.row.num_drafts == len(told.stream.request.prompt_ids)
        scores = drawn.scores[: len(progress.tokens)]
        return progress._replace(scores=scores, prompt_scores=prompt if is_first else ())

    def _meaning(self, told: _Told, token: int, *, after: int) -> tuple[EndReason | None, str]:
        """Returns why a token ends its request, or None, and the text that is final with it.

        Args:
            after: tokens sampled after it, which the stream has already.
        """
        stream, request = told.stream, told.stream.request
        num_tokens = len(stream.tokens) - after
        return end_of(request, told.text, token, num_tokens=num_tokens, limit=stream.limit)

    def _end(
        self,
        told: _Told,
        end: EndReason,
        *,
        tokens: tuple[int, ...] = (),
        text: str = "",
        error: str | None = None,
    ) -> RequestProgress:
        stream = told.stream
        del self._requests[stream.number]
        self._unadmitted.discard(stream.number)
        self.scheduler.end(stream)
        self.counts.ended[end] += 1
        end, rest = last_text(told.text, end)
        return RequestProgress(
            request=stream.number,
            tokens=tokens,
            text=text + rest,
            end=end,
            error=error,
            stop=None if told.text is None else told.text.found,
            num_cached=stream.num_cached,
        )
