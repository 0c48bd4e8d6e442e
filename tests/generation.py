"""Continuations for tests: by an engine, and without a cache as the oracle of all that has one."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra.model.decoder import Decoder
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest
from jaxinfra.serving.generate import bucket
from jaxinfra.serving.sampling import (
    SamplingConfig,
    SamplingNeeds,
    SamplingRows,
    TokenHistory,
    sample,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewToken:
    """One new token of one row."""

    row: int
    token: int
    end: EndReason | None = None  # on a row's last one


def served(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | Sequence[SamplingConfig],
    seed: int = 0,
    eos_ids: Collection[int] = (),
    num_ids: int | None = None,
) -> Iterator[NewToken]:
    """Tokens of an engine with room for all prompts, a row's number as its choice."""
    engine = _engine(model, num_ids)
    settings = [sampling] * len(prompts) if isinstance(sampling, SamplingConfig) else sampling
    requests = [
        GenerationRequest(
            prompt_ids=tuple(prompt),
            max_new_tokens=max_new_tokens,
            sampling=each,
            seed=seed,
            choice=number,
            eos_ids=frozenset(eos_ids),
        )
        for number, (prompt, each) in enumerate(zip(prompts, settings, strict=True))
    ]
    for row, came in enumerate(engine.run(requests)):
        assert came[-1].end is not EndReason.ERROR, came[-1].error
        tokens = [token for each in came for token in each.tokens]
        for place, token in enumerate(tokens, start=1):
            yield NewToken(row=row, token=token, end=came[-1].end if place == len(tokens) else None)


@functools.lru_cache(maxsize=8)  # programs are compiled once for a model
def _engine(model: Decoder, num_ids: int | None) -> Engine:
    length = bucket(model.config.max_positions, limit=64)
    options = EngineOptions(
        max_running=4,
        page_size=8,
        max_step_tokens=4 * length + 8,
        chunk_sizes=(length,),
        max_context=256,
        share_prefixes=False,
    )
    return Engine(model, num_ids=num_ids, options=options)


def recomputed(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | Sequence[SamplingConfig],
    seed: int = 0,
    eos_ids: Collection[int] = (),
    num_ids: int | None = None,
) -> Iterator[NewToken]:
    """The same tokens of one device, each from all tokens before it."""
    settings = [sampling] * len(prompts) if isinstance(sampling, SamplingConfig) else sampling
    limit, graph = model.config.max_positions, nnx.split(model)
    for row, (prompt, each) in enumerate(zip(prompts, settings, strict=True)):
        ids = list(prompt)
        last = min(len(prompt) + max_new_tokens, limit + 1)
        padded = np.zeros((1, bucket(last - 1, limit=limit)), np.int32)
        while len(ids) < last:
            padded[0, : len(ids)] = ids
            token = int(
                _next(
                    *graph,
                    padded,
                    np.int32(len(prompt)),
                    np.int32(len(ids)),
                    np.uint32(seed),
                    np.int32(row),
                    SamplingRows.of([each]),
                    needs=SamplingNeeds.of([each]),
                    num_ids=num_ids or model.config.vocab_size,
                )[0]
            )
            assert token >= 0, "logits that are not finite"
            ids.append(token)
            end = EndReason.EOS if token in eos_ids else None
            if end is None and len(ids) == last:
                is_whole = last == len(prompt) + max_new_tokens
                end = EndReason.LENGTH if is_whole else EndReason.CONTEXT
            yield NewToken(row=row, token=token, end=end)
            if end is not None:
                break


@functools.partial(jax.jit, static_argnames=("graphdef", "needs", "num_ids"))
def _next(
    graphdef: nnx.GraphDef,
    parameters: nnx.State,
    ids_1T: jax.Array,
    num_prompt: jax.Array,
    num_tokens: jax.Array,
    seed: jax.Array,
    row: jax.Array,
    sampling: SamplingRows,
    *,
    needs: SamplingNeeds,
    num_ids: int,
) -> jax.Array:
    model = nnx.merge(graphdef, parameters)
    out = model.run(ids_1T, contexts=num_tokens[None])
    last_11D = jax.lax.dynamic_slice_in_dim(out.x, num_tokens - 1, 1, axis=1)
    logits_1V = model.logits(last_11D)[:, 0, :num_ids]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), num_tokens)
    history = TokenHistory.empty(batch=1, num_ids=num_ids).begin(
        jnp.int32(0), ids_1T[0], num_prompt=num_prompt, num_tokens=num_tokens
    )
    drawn = sample(
        logits_1V,
        key[None],
        rows=sampling,
        needs=needs,
        history=history if needs.penalties else None,
    )
    return jnp.where(drawn.is_finite_B, drawn.ids_B, -1)
