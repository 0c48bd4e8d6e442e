"""Log-probabilities of the same completions by an engine and by a training program."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.model import LatentAttentionConfig
from jaxinfra.config.precision import Numerics, PolicyName, PrecisionConfig
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.model.definition import ModelDefinition, Parameters
from jaxinfra.numerics.policy import Policy, policy_of
from jaxinfra.parallel.place import Placement
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.training.preferences import target_values

SHARED = (7, 31, 12, 5, 44, 9, 23, 18, 2)  # first tokens of two prompts
PROMPTS = ((3, 50, 4), (*SHARED, 61, 8), tuple(range(1, 38)), (*SHARED, 5), (17,))
NEW = 8  # tokens of each completion

WINDOWED = {"window": 5, "sinks": True, "logit_soft_cap": 4.0}
LATENT = LatentAttentionConfig(
    num_q_heads=4, query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12,
    rope=RopeConfig(pairs=RopePairs.NEIGHBOURS), window=21, scale=0.4,
)  # fmt: skip

SMALL_CHUNKS = EngineOptions(
    max_running=3,
    page_size=4,
    num_pages=16,  # too few for three requests of their full length
    max_step_tokens=20,
    chunk_sizes=(8,),
    max_piece_rows=1,
)
"""Prompts in chunks, few pages, prefixes shared."""

WHOLE_PROMPTS = EngineOptions(
    max_running=5,
    page_size=16,
    max_step_tokens=160,
    chunk_sizes=(64,),
    max_context=64,
    share_prefixes=False,
)
"""Each prompt at once, all requests side by side."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt, the tokens after it and the log-probability of each."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: np.ndarray
    num_cached: int = 0  # tokens of the prompt that another request had computed


def policy(name: PolicyName, numerics: Numerics = Numerics.EXACT) -> Policy:
    """The policy of a run with these settings."""
    return policy_of(PrecisionConfig(policy=name, numerics=numerics))


def random_parameters(definition: ModelDefinition) -> Parameters:
    """Parameters large enough that completions differ."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype), definition.arrays
    )


def requested(
    prompt: tuple[int, ...], *, temperature: float = 1.0, new: int = NEW
) -> GenerationRequest:
    """A request with scores, whose draws its prompt decides, not its place."""
    sampling = SamplingConfig(temperature=temperature, logprobs=0)
    choice = PROMPTS.index(prompt) if prompt in PROMPTS else len(prompt)
    return GenerationRequest(
        prompt_ids=prompt, max_new_tokens=new, sampling=sampling, seed=1, choice=choice
    )


def completed(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """The completions of requests that an engine runs side by side."""
    found = []
    for request, came in zip(requests, engine.run(requests), strict=True):
        assert came[-1].error is None, came[-1].error
        scores = [score.logprob for each in came for score in each.scores]
        tokens = tuple(token for each in came for token in each.tokens)
        found.append(
            Completion(
                prompt=tuple(request.prompt_ids),
                tokens=tokens,
                scores=np.array(scores, np.float32),
                num_cached=max(each.num_cached for each in came),
            )
        )
    return found


def sampled(
    engine: Engine, prompts: Sequence[tuple[int, ...]] = PROMPTS, *, temperature: float = 1.0
) -> list[Completion]:
    """Completions of prompts."""
    return completed(engine, [requested(each, temperature=temperature) for each in prompts])


def trained_scores(
    definition: ModelDefinition,
    tree: Parameters,
    completions: Sequence[Completion],
    *,
    packed: bool = True,
    differentiated: bool = True,
    placement: Placement | None = None,
) -> list[np.ndarray]:
    """Log-probabilities as a training program computes them beside its gradient, of packed rows in
    another order, or of a row for each.
    """
    length, num_rows = 64, 4 if packed else len(completions)
    arrays = {name: np.zeros((num_rows, length), np.int32) for name in ("ids", "to", "at")}
    segments = np.full((num_rows, length), -1, np.int32)
    row, column, places = 0, 0, {}
    for number in reversed(range(len(completions))):
        text = (*completions[number].prompt, *completions[number].tokens)
        count = len(text) - 1
        if column and (not packed or column + count > length):
            row, column = row + 1, 0
        here = (row, slice(column, column + count))
        arrays["ids"][here], arrays["to"][here] = text[:-1], text[1:]
        arrays["at"][here], segments[here] = np.arange(count), number
        places[number] = row, column + len(completions[number].prompt) - 1
        column += count

    def loss(tree, ids_BT, targets_BT, positions_BT, segments_BT):
        decoder = definition.bind(tree)
        documents = {"segment_ids": segments_BT, "positions": positions_BT} if packed else {}
        hidden = decoder.hidden(ids_BT, **documents)
        each_BT = target_values(definition, tree, hidden, targets_BT)
        return jnp.sum(jnp.where(segments_BT >= 0, each_BT, 0.0)), each_BT

    given = (*arrays.values(), segments)
    if placement is not None:
        tree = jax.device_put(tree, placement.parameters(definition))
        given = jax.device_put(given, placement.batch)
    if differentiated:
        (_, each_BT), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(tree, *given)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    else:
        _, each_BT = jax.jit(loss)(tree, *given)
    each_BT = np.asarray(each_BT)
    return [
        each_BT[places[i][0], places[i][1] : places[i][1] + len(found.tokens)]
        for i, found in enumerate(completions)
    ]


def num_different(completions: Sequence[Completion], scores: Sequence[np.ndarray]) -> int:
    """Number of log-probabilities whose bits differ."""
    return sum(
        int((found.scores.view(np.int32) != each.view(np.int32)).sum())
        for found, each in zip(completions, scores, strict=True)
    )
