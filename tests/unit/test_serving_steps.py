"""A prompt taken in by chunks is continued as one taken in at once."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.rope import LongRopeScaling, RopeConfig
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.generate import generate
from jaxinfra.serving.sampling import GREEDY, SamplingConfig, SamplingNeeds, SamplingRows
from jaxinfra.serving.steps import StepConfig, decode, empty_state, extend
from tests.decoder_oracle import attention, drawn, model

PROMPTS = ((5,) * 3, tuple(range(1, 24)), (7, 25, 3, 29, 4, 8, 1, 2, 3, 30))
SETTINGS = [GREEDY, SamplingConfig(temperature=0.8), GREEDY]
NEEDS = SamplingNeeds.of(SETTINGS)
NEW, CHUNK, SLOTS = 6, 8, 64

LONG = LongRopeScaling(
    short_factors=(1.0,) * 4,
    long_factors=(1.5, 2.0, 4.0, 8.0),
    original_max_positions=12,  # row 1 lies beyond it, rows 0 and 2 stay within
    attention_factor=1.1,
)
MODELS = {
    "window": model(attention(window=5), attention(num_kv_heads=1)),
    "longrope": model(attention(rope=RopeConfig(theta=100.0, scaling=LONG))),
}


def in_chunks(config: ModelConfig, seed: int) -> list[list[int]]:
    """Rows take chunks of random sizes, none at times, then a token each."""
    decoder = bound(config)
    graphdef, weights = nnx.split(decoder)
    step = StepConfig(graphdef=graphdef, num_ids=config.vocab_size, needs=NEEDS)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(3), np.arange(3))
    sampling = SamplingRows.of(SETTINGS)
    state = empty_state(decoder, num_slots=SLOTS, keys_B=keys, sampling=sampling, config=step)
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    done, rng = np.zeros(3, np.int32), np.random.default_rng(seed)
    first = np.zeros(3, np.int32)
    while (done < lengths).any():
        counts = np.minimum(rng.integers(0, CHUNK + 1, 3), lengths - done).astype(np.int32)
        ids = np.full((3, CHUNK), 30, np.int32)
        for row, count in enumerate(counts):
            ids[row, :count] = PROMPTS[row][done[row] : done[row] + count]
        drawn_ids, state = extend(weights, state, ids, counts, lengths, config=step)
        done += counts
        # What a row draws counts from the step on that ends its prompt; later ones draw it again
        # from no new token.
        ended = (done == lengths) & (counts > 0)
        first = np.where(ended, np.asarray(drawn_ids), first)
    rows = [[int(token)] for token in first]
    tokens = first
    for _ in range(NEW - 1):
        tokens, state = decode(weights, state, tokens, config=step)
        for row, token in zip(rows, np.asarray(tokens), strict=True):
            row.append(int(token))
    return rows


def bound(config: ModelConfig):
    definition = define_model(config, execution_on())
    return definition.bind(drawn(definition))


@pytest.mark.slow_cases("window")
@pytest.mark.parametrize("name", MODELS)
def test_chunks_continue_as_the_whole_prompt(name):
    config = dataclasses.replace(MODELS[name], max_positions=SLOTS)
    whole = [[] for _ in PROMPTS]
    for new in generate(bound(config), PROMPTS, max_new_tokens=NEW, sampling=SETTINGS, seed=3):
        whole[new.row].append(new.token)
    if name == "longrope":
        # Row 2 would cross over while it is continued, which generate runs again by the other
        # angles: compared up to there.
        whole[2], crossing = whole[2][:3], 3
    for seed in (0, 1):
        got = in_chunks(config, seed)
        if name == "longrope":
            got[2] = got[2][:crossing]
        assert got == whole


def test_a_full_row_stays_as_it_is():
    config = dataclasses.replace(MODELS["window"], max_positions=SLOTS)
    decoder = bound(config)
    graphdef, weights = nnx.split(decoder)
    step = StepConfig(graphdef=graphdef, num_ids=config.vocab_size, needs=SamplingNeeds())
    state = empty_state(
        decoder,
        num_slots=CHUNK,
        keys_B=jax.random.split(jax.random.key(0), 2),
        sampling=SamplingRows.of([GREEDY] * 2),
        config=step,
    )
    ids = np.arange(2 * CHUNK, dtype=np.int32).reshape(2, CHUNK)
    counts = np.array([CHUNK, 2], np.int32)
    tokens, state = extend(weights, state, ids, counts, counts, config=step)
    before = [np.asarray(x) for x in jax.tree.leaves(state.cache)]
    _, state = decode(weights, state, tokens, config=step)
    assert state.positions_B.tolist() == [CHUNK, 3]
    for old, new in zip(before, jax.tree.leaves(state.cache), strict=True):
        np.testing.assert_array_equal(old[:, 0], new[:, 0])
        assert (old[:, 1, 2] != np.asarray(new)[:, 1, 2]).any()
        np.testing.assert_array_equal(old[:, 1, 3:], new[:, 1, 3:])
