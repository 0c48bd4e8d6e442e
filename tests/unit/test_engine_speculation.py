"""Drafts change when tokens come, not which: every draw is that of the request alone."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_models import OPTIONS, PROMPTS, alone, definition, model, parameters

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.engine import Engine, NgramLookup
from jaxinfra.serving.engine.options import Preemption
from jaxinfra.serving.engine.requests import GenerationRequest, RequestStream
from jaxinfra.serving.sampling import GREEDY, SamplingConfig
from tests.generation import recomputed

GOLDEN = Path(__file__).parents[1] / "golden/hf"

DRAFTING = dataclasses.replace(
    OPTIONS, num_drafts=3, max_step_tokens=40, num_pages=12, preemption=Preemption.HOST
)
# Hot enough to draw, cold enough that a similar model draws alike.
SETTINGS = (SamplingConfig(temperature=0.0, logprobs=2), SamplingConfig(temperature=0.4, top_k=20))


def near():
    """The model's parameters, a little off."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + 0.01 * rng.normal(size=leaf.shape).astype(leaf.dtype), parameters()
    )


@pytest.mark.slow  # by default the drafts of `test_mtp.py`
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_every_draw_is_that_without_drafts(draft):
    other = definition().bind(near()) if draft == "model" else None
    engine = Engine(model(), num_ids=257, options=DRAFTING, draft=other)
    # Repeated beginnings give the look-up something to find. Of one length: each is a program.
    prompts = [PROMPTS[1], PROMPTS[1][::-1], (5, 6, 7, 8) * 2 + (5, 6)]
    requests = [
        GenerationRequest(prompt_ids=p, max_new_tokens=14, sampling=s, seed=5)
        for p in prompts
        for s in SETTINGS
    ]
    came = engine.run(requests)
    got = [[t for each in one for t in each.tokens] for one in came]
    want = [alone(p, new=14, sampling=s, seed=5) for p in prompts for s in SETTINGS]
    assert got == want
    for tokens, one in zip(got[::2], came[::2], strict=True):  # greedy: the likeliest
        scores = [score for each in one for score in each.scores]
        assert [score.top[0] for score in scores] == [
            (token, score.logprob) for token, score in zip(tokens, scores, strict=True)
        ]
    counts = engine.counts
    assert 0 < counts.accepted_tokens < counts.drafted_tokens
    if draft == "model":
        assert counts.accepted_tokens > 0.4 * counts.drafted_tokens
        assert engine.counts.steps < 14 * len(requests) / 2
    assert engine.scheduler.allocator.num_in_use == 0
    assert engine.scheduler.host.num_restored > 0, "pages of both models"


def test_what_followed_before_is_proposed():
    lookup = NgramLookup(num_drafts=3)

    def proposed(*tokens):
        request = GenerationRequest(prompt_ids=tokens, max_new_tokens=1)
        stream = RequestStream(number=0, request=request, tokens=[*tokens], limit=0)
        return list(lookup(stream))

    assert proposed(1, 2, 3, 4, 5, 1, 2) == [3, 4, 5]
    assert proposed(1, 2, 9, 1, 2, 8, 1, 2) == [8, 1, 2]
    assert proposed(7, 1, 2, 9, 8, 1, 2, 7, 1, 2) == [9, 8, 1]
    assert proposed(1, 2, 3) == []
    assert proposed(1) == []


def test_a_draft_of_another_vocabulary_is_refused():
    config = dataclasses.replace(definition().config, vocab_size=64)
    other = define_model(config, execution_on())
    with pytest.raises(ConfigError, match="vocabulary is 64, the model's 300"):
        Engine(model(), options=DRAFTING, draft=other.bind(other.initialize(jax.random.key(0))))


FAMILIES = sorted(each.parent.name for each in GOLDEN.glob("*/config.json"))
SIZES = [(4,), (8,), (4, 16), (2, 8)]  # sizes of chunks


def drifted(pretrained):
    """The decoder of a loaded model whose parameters are a little off."""
    rng = np.random.default_rng(1)

    def moved(leaf):
        noise = 0.1 * np.asarray(leaf).std() * rng.normal(size=leaf.shape)
        return leaf + noise.astype(leaf.dtype)

    return pretrained.definition.bind(jax.tree.map(moved, pretrained.parameters))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_chunks_and_preemption_change_no_token_of_a_family(family, draft):
    """Answers cross the windows, of 5 to 9, YaRN's 16 positions, and LongRoPE's 30."""
    pretrained = load_pretrained(GOLDEN / family)
    whole = pretrained.definition.bind(pretrained.parameters)
    rng = np.random.default_rng([*family.encode()])
    ids = rng.integers(0, whole.config.vocab_size, 6).tolist()
    prompts = [tuple(ids * 4)[:length] for length in (3, 13, 18, 24)]
    want = [[] for _ in prompts]
    for each in recomputed(whole, prompts, max_new_tokens=20, sampling=GREEDY):
        want[each.row].append(each.token)
    options = dataclasses.replace(
        DRAFTING,
        max_context=48,
        num_pages=14,
        chunk_sizes=SIZES[rng.integers(len(SIZES))],
        preemption=rng.choice([Preemption.HOST, Preemption.RECOMPUTE]),
    )
    engine = Engine(whole, options=options, draft=drifted(pretrained) if draft == "model" else None)
    requests = [GenerationRequest(prompt_ids=p, max_new_tokens=20) for p in prompts]
    assert [[t for each in one for t in each.tokens] for one in engine.run(requests)] == want
    assert engine.counts.drafted_tokens
    assert engine.scheduler.num_preemptions
