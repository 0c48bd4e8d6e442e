"""Continues prompts with an engine, for ``jaxinfra.generate``, commands and training samples."""

import collections
import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Sequence

import jax

from jaxinfra.errors import CheckpointError, DataError
from jaxinfra.serving import own_mixers
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import options_on
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import SamplingConfig

_MIN_BUCKET = 16


def request_of(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int = 0,
    choice: int = 0,
) -> GenerationRequest:
    """Makes a generation request that ends at the model's end tokens.

    Args:
        choice: tells apart samples of equal prompts with one seed.
    """
    return GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        choice=choice,
        eos_ids=frozenset(model.tokenizer.end_ids),
    )


def engine_for(
    model: LoadedModel,
    requests: Sequence[GenerationRequest],
    *,
    consumes: bool = False,
    share_prefixes: bool = False,
) -> Engine:
    """Returns an engine with room for these requests, running as many at once as a server would.

    The model keeps the engine and its compiled programs for the next call.

    Args:
        consumes: free weights that the engine has in its own form; nothing else may use the model
            then.
        share_prefixes: compute a common beginning of prompts only once. Without it, texts do not
            depend on earlier calls, not even by rounding.
    """
    defaults, config = options_on(jax.default_backend()), model.definition.config
    longest = max(len(each.prompt_ids) + each.max_new_tokens - 1 for each in requests)
    context = bucket(longest, limit=config.max_positions)
    running = bucket(len(requests), least=1, limit=defaults.max_running)
    found: Engine | None = model.kept.get("engine")
    if (
        found is None
        or found.is_busy
        or found.limits.share_prefixes is not share_prefixes
        or not found.has_room(running, context)
    ):
        # Its pages and its form of the weights are freed before those of another are made.
        found = model.kept["engine"] = None
        options = dataclasses.replace(
            defaults,
            max_running=running,
            max_context=context,
            share_prefixes=share_prefixes,
        )
        found = model.kept["engine"] = Engine.of(model, options=options, consumes=consumes)
    return found


def generate(
    model: LoadedModel,
    requests: Sequence[GenerationRequest],
    *,
    consumes: bool = False,
) -> Iterator[tuple[int, RequestProgress]]:
    """Runs requests side by side; yields the index and progress of each request with new tokens.

    A request's sampled tokens depend on it alone; only rounding may differ with the requests beside
    it. Requests are checked at once, before iteration.

    Args:
        consumes: free the model's weights, as in ``engine_for``.

    Raises:
        ConfigError, DataError: the engine cannot serve a request.
        CheckpointError: logits are not finite; raised while iterating.
    """
    if not requests:
        raise DataError("there are no prompts; give at least one")
    if not own_mixers.has_pages(model):
        return _finite(own_mixers.run(model, requests))
    engine = engine_for(model, requests, consumes=consumes)
    for place, request in enumerate(requests):
        try:
            engine.check(request)
        except DataError as error:
            raise DataError(f"prompt {place}: {error}") from error
    return _finite(_run(engine, requests))


def _finite(
    told: Generator[tuple[int, RequestProgress]],
) -> Iterator[tuple[int, RequestProgress]]:
    """Passes progress on; raises CheckpointError at a request with nothing to draw from."""
    counts: collections.Counter[int] = collections.Counter()
    with contextlib.closing(told):
        for place, progress in told:
            if progress.end is EndReason.ERROR:
                raise CheckpointError(
                    f"the logits of prompt {place} for new token {counts[place] + 1} are not "
                    "finite, so there is nothing to draw: its weights, or what this precision "
                    "makes of them, are not; take an earlier checkpoint, or another --policy"
                )
            counts[place] += len(progress.tokens)
            yield place, progress


def _run(
    engine: Engine, requests: Sequence[GenerationRequest]
) -> Generator[tuple[int, RequestProgress]]:
    places = {engine.submit(request): place for place, request in enumerate(requests)}
    try:
        while places:
            for progress in engine.step():
                place = places[progress.request]
                if progress.end is not None:
                    del places[progress.request]
                yield place, progress
    finally:
        for number in places:
            engine.cancel(number)  # where nobody wants the rest
        while engine.is_busy:
            engine.step()


def generate_text(
    model: LoadedModel,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int = 0,
    consumes: bool = False,
) -> Iterator[RequestProgress]:
    """Continues a prompt as the beginning of a document; yields progress with whole characters.

    The joined texts are the text of all tokens before the end token. Raises what ``generate``
    raises.

    Args:
        prompt: a text, or token ids, for example of a rendered conversation.
        consumes: free the model's weights, as in ``engine_for``.
    """
    ids = model.prompt(prompt) if isinstance(prompt, str) else prompt
    request = request_of(model, ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    return (progress for _, progress in generate(model, [request], consumes=consumes))


def bucket(length: int, *, limit: int, least: int = _MIN_BUCKET) -> int:
    """Rounds a length up to a power of two from ``least`` to ``limit``, to compile few shapes."""
    return min(max(least, 1 << (length - 1).bit_length()), limit)
