"""Models with mixers of a user's own generate: from a state, or from the whole text."""

import dataclasses
import logging

import generation
import jax
import jax.numpy as jnp
import pytest
import small_models
from flax import nnx

import jaxinfra
from jaxinfra.config.model import BlockConfig, ModelConfig, Stack
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving import own_mixers
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.generate import engine_for, generate
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import SamplingConfig

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]
WARM = SamplingConfig(temperature=0.8, top_k=20)


class Mean(nnx.Module):
    """The mean of all positions so far, times a scale."""

    def __init__(self, config, *, model_dim, std, out_std, execution, rngs):
        self.keeps = config.keeps
        self.scale = nnx.Param(
            jax.random.normal(rngs.params(), model_dim, execution.policy.param), axes=(None,)
        )

    def __call__(self, x, given):
        total = jnp.cumsum(x, axis=1)
        if given.cache is not None:
            total = total + given.cache.read()["total"][:, None]
        mean = total / (1 + given.positions_BT)[..., None].astype(x.dtype)
        cache = given.cache and given.cache.write({"total": total[:, -1]})
        return jaxinfra.LayerOutput(x=mean * self.scale[...][None, None], cache=cache)


@jaxinfra.part
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanConfig(jaxinfra.OwnMixer):
    """``Mean`` with a state, or without."""

    keeps: bool = False
    layer = Mean

    def state(self, model_dim):
        return {"total": (model_dim,)} if self.keeps else None


def loaded(config: ModelConfig) -> LoadedModel:
    definition = define_model(config, execution_on())
    return LoadedModel(
        definition=definition,
        parameters=definition.initialize(jax.random.key(0)),
        tokenizer=bytes_tokenizer(),
        config=None,
        step=None,
    )


def with_mean(*, keeps: bool) -> LoadedModel:
    """A layer of attention, then one of means, twice."""
    config = small_models.dense()
    block = config.blocks[0]
    own = BlockConfig(mixer=MeanConfig(keeps=keeps), feed_forward=block.feed_forward)
    return loaded(dataclasses.replace(config, stacks=(Stack(repeats=2, pattern=(block, own)),)))


def requests(**settings) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_ids=tuple(ids), max_new_tokens=6, choice=n, seed=3, **settings)
        for n, ids in enumerate(PROMPTS)
    ]


def tokens(told) -> dict[int, list[int]]:
    found = {place: [] for place in range(len(PROMPTS))}
    for place, progress in told:
        found[place] += progress.tokens
    return found


@pytest.mark.slow  # by default `test_own_parts.py` decodes over a cache
@pytest.mark.parametrize("keeps", [False, True], ids=["whole", "state"])
def test_an_own_mixer_generates_what_the_whole_text_gives(keeps, caplog):
    model, options = with_mean(keeps=keeps), {"max_new_tokens": 6, "sampling": WARM, "seed": 3}
    expected = {place: [] for place in range(len(PROMPTS))}
    for each in generation.recomputed(model.decoder, PROMPTS, num_ids=model.num_ids, **options):
        expected[each.row].append(each.token)
    with caplog.at_level(logging.WARNING):
        assert tokens(generate(model, requests(sampling=WARM))) == expected
        tokens(generate(model, requests()[:1]))
    assert len(caplog.records) == (0 if keeps else 1)


@pytest.mark.slow
def test_without_pages_the_tokens_are_an_engine_s():
    model = loaded(small_models.dense(vocab_size=300))
    assert own_mixers.has_pages(model)
    served = tokens(generate(model, requests(sampling=WARM)))
    assert tokens(own_mixers.run(model, requests(sampling=WARM))) == served


def test_what_needs_an_engine_is_refused():
    model = with_mean(keeps=True)
    asked = requests(sampling=SamplingConfig(logprobs=1))
    with pytest.raises(UnsupportedError, match="prompt 0 with logprobs"):
        generate(model, asked)
    with pytest.raises(UnsupportedError, match=r"use jaxinfra\.generate"):
        engine_for(model, requests())
