"""Generation for models with a user's own mixer that has no KV pages. It keeps the mixer's own
state, or computes the whole text again for each token.

Dims: B row, T token, S position, V vocabulary.
"""

import abc
import dataclasses
import functools
import logging
from collections.abc import Generator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra.config.own import OwnMixer
from jaxinfra.errors import DataError, UnsupportedError
from jaxinfra.model.decoder import Decoder, KVCache
from jaxinfra.serving.engine.engine import NOT_FINITE
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress
from jaxinfra.serving.engine.text import TextStream, end_of, last_text, text_of
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import NO_TOKEN, SamplingNeeds, SamplingRows, sample, sampling_key

_ROWS = 32  # that run side by side
_LEAST_SIZE = 16
_LARGEST_CHUNK = 256  # tokens of a prompt in one pass

_LOG = logging.getLogger(__name__)


def has_pages(model: LoadedModel) -> bool:
    """Tells whether every mixer of a model caches tokens in pages, as an engine needs."""
    return all(type(mixer).cache is not OwnMixer.cache for mixer in _own_mixers(model))


def run(
    model: LoadedModel, requests: Sequence[GenerationRequest]
) -> Generator[tuple[int, RequestProgress]]:
    """Runs requests in groups; yields the index and progress of each request with a new token.
    Requests are checked at once, before iteration.

    The tokens are those that an engine would sample. If a mixer keeps no state, each token costs a
    pass over the whole text, which the log says once per model.

    Raises:
        UnsupportedError: a sampling setting that needs an engine, or rows spread over devices.
        DataError: a prompt has no tokens, or more than the model has positions.
    """
    model.definition.config.require_logits()
    context = model.definition.config.max_positions
    for place, request in enumerate(requests):
        _check(request, context=context, place=place)
    if model.decoder.execution.place.batch_shards > 1:
        raise UnsupportedError(
            f"{_names(model)} has no pages, so its rows are not spread over devices; load the "
            "model with a mesh of tensor alone"
        )
    if not _keeps_state(model) and "told" not in model.kept:
        model.kept["told"] = True
        _LOG.warning(
            "%s keeps nothing between tokens: the whole text is computed for each new one; declare "
            "OwnMixer.state to go on from a state",
            _names(model),
        )
    return _groups(model, requests)


def _groups(
    model: LoadedModel, requests: Sequence[GenerationRequest]
) -> Generator[tuple[int, RequestProgress]]:
    for first in range(0, len(requests), _ROWS):
        for place, progress in _group(model, requests[first : first + _ROWS]):
            yield first + place, progress


def _own_mixers(model: LoadedModel) -> list[OwnMixer]:
    mixers = (block.mixer for block in model.definition.config.blocks)
    return [mixer for mixer in mixers if isinstance(mixer, OwnMixer)]


def _keeps_state(model: LoadedModel) -> bool:
    width = model.definition.config.model_dim
    return all(mixer.state(width) is not None for mixer in _own_mixers(model))


def _names(model: LoadedModel) -> str:
    return ", ".join(dict.fromkeys(type(mixer).__name__ for mixer in _own_mixers(model)))


def _check(request: GenerationRequest, *, context: int, place: int) -> None:
    if not 1 <= len(request.prompt_ids) <= context:
        raise DataError(
            f"prompt {place} has {len(request.prompt_ids)} tokens; the model takes 1 to {context}"
        )
    needs = {
        "penalties": request.sampling.is_penalized,
        "logprobs": request.sampling.logprobs is not None,
        "a grammar": request.constraint is not None,
        "an adapter": request.adapter is not None,
    }
    if asked := [name for name, is_asked in needs.items() if is_asked]:
        raise UnsupportedError(
            f"prompt {place} with {' and '.join(asked)}: only models whose mixers all cache tokens "
            "have these; leave them out"
        )


@dataclasses.dataclass(kw_only=True)
class _Row:
    """A request under way."""

    request: GenerationRequest
    text: TextStream
    tokens: list[int]
    limit: int  # tokens in all
    end: EndReason | None = None

    def take(self, token: int) -> RequestProgress:
        """Adds a sampled token; ``end`` says whether it is the last."""
        if token == NO_TOKEN:
            self.end = EndReason.ERROR
            return RequestProgress(request=0, end=self.end, error=NOT_FINITE)
        self.tokens.append(token)
        num_tokens = len(self.tokens)
        self.end, text = end_of(
            self.request, self.text, token, num_tokens=num_tokens, limit=self.limit
        )
        if self.end is not None:
            self.end, rest = last_text(self.text, self.end)
            text += rest
        return RequestProgress(request=0, tokens=(token,), text=text, end=self.end)


def _group(
    model: LoadedModel, requests: Sequence[GenerationRequest]
) -> Generator[tuple[int, RequestProgress]]:
    """Runs these requests side by side until all have ended."""
    context = model.definition.config.max_positions
    rows = [
        _Row(
            request=each,
            text=text_of(model.tokenizer, each),
            tokens=[*each.prompt_ids],
            # The last token is sampled, and never read.
            limit=min(len(each.prompt_ids) + each.max_new_tokens, context + 1),
        )
        for each in requests
    ]
    reader = (_Kept if _keeps_state(model) else _Again)(model.decoder, rows)
    configs = [each.sampling for each in requests]
    settings, needs = SamplingRows.of(configs), SamplingNeeds.of(configs)
    seeds = np.array([each.seed_bits for each in requests], np.uint32)
    choices = np.array([each.choice for each in requests], np.int32)
    logits_BV = reader.logits()
    while True:
        counts = np.array([len(row.tokens) for row in rows], np.int32)
        known_BV = logits_BV[:, : model.num_ids]
        drawn = _draw(known_BV, seeds, choices, counts, settings, needs=needs)
        for place, (row, token) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            if row.end is None:
                yield place, row.take(token)
        if all(row.end is not None for row in rows):
            return
        logits_BV = reader.logits()


class _Reader(abc.ABC):
    """Base of what gives the logits after each row's last token."""

    def __init__(self, decoder: Decoder, rows: Sequence[_Row]):
        self._decoder, self._rows = decoder, rows
        self._split = nnx.split(decoder)
        longest = max(row.limit for row in rows) - 1  # the last token is not read
        size = max(_LEAST_SIZE, 1 << (longest - 1).bit_length())
        self._size = min(size, decoder.config.max_positions)

    @abc.abstractmethod
    def logits(self) -> jax.Array:
        """Returns fp32 logits [B, V] after each row's last token."""


@final
class _Again(_Reader):
    """Computes the whole text of every row at every call."""

    def logits(self) -> jax.Array:
        tokens_BS = np.zeros((len(self._rows), self._size), np.int32)
        segments_BS = np.full_like(tokens_BS, -1)
        for row, ids, segments in zip(self._rows, tokens_BS, segments_BS, strict=True):
            ids[: len(row.tokens)] = row.tokens
            segments[: len(row.tokens)] = 0
        last_B = np.array([len(row.tokens) - 1 for row in self._rows], np.int32)
        return _of_whole(*self._split, tokens_BS, segments_BS, last_B)


@final
class _Kept(_Reader):
    """Goes on from the mixers' states: prompts row by row in whole chunks, then tokens together."""

    def __init__(self, decoder: Decoder, rows: Sequence[_Row]):
        super().__init__(decoder, rows)
        self._cache: Any = None

    def logits(self) -> jax.Array:
        if self._cache is None:
            logits, caches = zip(*map(self._prompt, self._rows), strict=True)
            # Of all caches the rows are the dim after the layers.
            self._cache = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *caches)
            return jnp.concatenate(logits)
        tokens_B1 = np.array([row.tokens[-1:] for row in self._rows], np.int32)
        positions_B1 = np.array([[len(row.tokens) - 1] for row in self._rows], np.int32)
        logits_BV, self._cache = _go_on(*self._split, tokens_B1, positions_B1, self._cache)
        return logits_BV

    def _prompt(self, row: _Row) -> tuple[jax.Array, Any]:
        cache = self._decoder.empty_cache(batch=1, num_slots=self._size)
        start, logits_1V = 0, None
        while start < len(row.tokens):
            # Powers of two, so that few lengths are compiled and none is padded.
            left = min(len(row.tokens) - start, _LARGEST_CHUNK)
            end = start + (1 << (left.bit_length() - 1))
            positions_1T = np.arange(start, end, dtype=np.int32)[None]
            tokens_1T = np.array([row.tokens[start:end]], np.int32)
            logits_1V, cache = _go_on(*self._split, tokens_1T, positions_1T, cache)
            start = end
        assert logits_1V is not None, "a prompt has a token"
        return logits_1V, cache


@functools.partial(jax.jit, static_argnums=0)
def _of_whole(
    graphdef: nnx.GraphDef[Decoder],
    parameters: nnx.State,
    tokens_BS: jax.Array,
    segments_BS: jax.Array,
    last_B: jax.Array,
) -> jax.Array:
    decoder = nnx.merge(graphdef, parameters)
    hidden_BSD = decoder.hidden(tokens_BS, segment_ids=segments_BS)
    return decoder.logits(jnp.take_along_axis(hidden_BSD, last_B[:, None, None], axis=1))[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def _go_on(
    graphdef: nnx.GraphDef[Decoder],
    parameters: nnx.State,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    decoder = nnx.merge(graphdef, parameters)
    out = decoder.run(tokens_BT, positions=positions_BT, cache=cache)
    return decoder.logits(out.x[:, -1:])[:, 0], out.cache


@functools.partial(jax.jit, static_argnames="needs")
def _draw(
    logits_BV: jax.Array,
    seeds_B: jax.Array,
    choices_B: jax.Array,
    counts_B: jax.Array,
    settings: SamplingRows,
    *,
    needs: SamplingNeeds,
) -> jax.Array:
    """Samples the token after ``counts_B`` tokens of each row, with the keys of an engine."""
    keys_B = jax.vmap(sampling_key)(seeds_B, choices_B, counts_B)
    drawn = sample(logits_BV, keys_B, rows=settings, needs=needs)
    return jnp.where(drawn.is_finite_B, drawn.ids_B, NO_TOKEN)
