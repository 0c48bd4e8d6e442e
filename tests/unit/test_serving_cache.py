"""Cached decoding computes what the uncached decoder does, at every position.

Dims: B batch, T position, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.model import stacked
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.cache import PagedCache, after_pass, cached_numbers
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import define_model, only
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on
from tests.decoder_oracle import MODELS, drawn, make, oracle
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

LENGTH = 24
PROMPTS = (1, 7, 13)  # tokens of each row before decoding starts
CASES = [
    # Between grouped heads and one or all of them only numbers differ.
    *(
        pytest.param(
            name, PolicyName.FP32, marks=[pytest.mark.slow] * (name in ("mha", "mqa", "window"))
        )
        for name in MODELS
    ),
    ("gqa", PolicyName.BF16),
    pytest.param("latent", PolicyName.BF16, marks=pytest.mark.slow),
    pytest.param("gemma", PolicyName.BF16, marks=pytest.mark.slow),
]


@jax.jit
def uncached_logits(decoder: Decoder, ids_BT):
    return decoder(ids_BT)


@jax.jit
def prefill_logits(decoder: Decoder, ids_BT):
    batch, length = ids_BT.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    cache = decoder.empty_cache(batch=batch, num_slots=LENGTH)
    out = decoder.run(ids_BT, positions=positions, cache=cache)
    return decoder.logits(out.x), out.cache


@jax.jit
def chunk_logits(decoder: Decoder, ids_BT, positions_BT, cache):
    out = decoder.run(ids_BT, positions=positions_BT, cache=cache)
    return decoder.logits(out.x), out.cache


@jax.jit
def decode_logits(decoder: Decoder, ids_B1, positions_B1, cache):
    out = decoder.run(ids_B1, positions=positions_B1, cache=cache)
    return decoder.logits(out.x)[:, 0], out.cache


def continued(decoder, ids, logits, cache, starts):
    """Feeds row b its tokens from ``starts[b]`` on, one a step, filling in ``logits``."""
    rows = np.arange(len(ids))
    for step in range(LENGTH - min(starts)):
        # A row that is through repeats its last token, as in generation.
        positions = np.minimum(np.array(starts) + step, LENGTH - 1).astype(np.int32)
        new, cache = decode_logits(
            decoder, ids[rows, positions][:, None], positions[:, None], cache
        )
        logits[rows, positions] = np.asarray(new)
    return logits


@pytest.mark.slow_cases(
    "gqa-bf16", "gqa-fp32", "two_stacks-fp32", "learned_positions-fp32", "latent-fp32"
)
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_cached_logits_agree_at_every_position(name, policy):
    parameters, decoder = make(name, policy)
    ids = np.random.default_rng(seeded(0)).integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    true = oracle(parameters, MODELS[name], ids, policy)
    assert_within_rounding(uncached_logits(decoder, ids), true, what="without a cache")

    padded = np.full((len(PROMPTS), max(PROMPTS)), 30, np.int32)
    for row, length in enumerate(PROMPTS):
        padded[row, :length] = ids[row, :length]
    at_prefill, cache = prefill_logits(decoder, padded)
    logits = np.full(true.shape, np.nan, np.float32)
    for row, length in enumerate(PROMPTS):
        logits[row, :length] = np.asarray(at_prefill)[row, :length]
    logits = continued(decoder, ids, logits, cache, starts=PROMPTS)
    assert_within_rounding(logits, true, what="prefill, then decoding")

    logits = np.full(true.shape, np.nan, np.float32)
    empty = decoder.empty_cache(batch=len(PROMPTS), num_slots=LENGTH)
    logits = continued(decoder, ids, logits, empty, starts=[0] * len(PROMPTS))
    assert_within_rounding(logits, true, what="decoding alone")


def in_pages(decoder, rng, *, batch: int, page_size: int = 4):
    """An empty cache of the decoder whose rows have their pages in random order."""
    num_pages = LENGTH // page_size
    pool = 2 * batch * num_pages
    tables = rng.permutation(pool)[: batch * num_pages].reshape(batch, num_pages)
    config = decoder.config
    return tuple(
        PagedCache.zeros(
            block.mixer.cache,
            num_layers=repeats,
            num_pages=pool,
            page_size=page_size,
            tables_BM=jnp.asarray(tables, jnp.int32),
            dtype=decoder.execution.policy.compute,
        )
        for block, repeats in zip(config.blocks, config.repeats, strict=True)
    )


@pytest.mark.slow_cases("learned_positions-fp32", "two_stacks-fp32", "latent-fp32", "gemma-bf16")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("gemma", PolicyName.BF16),
        ("two_stacks", PolicyName.FP32),
        ("latent", PolicyName.FP32),
        ("learned_positions", PolicyName.FP32),
    ],
)
def test_a_prompt_in_chunks_is_the_prompt_at_once(name, policy):
    parameters, decoder = make(name, policy)
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    true = oracle(parameters, MODELS[name], ids, policy)
    contiguous = decoder.empty_cache(batch=len(PROMPTS), num_slots=LENGTH)
    results = []
    for cache in (contiguous, in_pages(decoder, rng, batch=len(PROMPTS))):
        logits = np.full(true.shape, np.nan, np.float32)
        done = np.zeros(len(PROMPTS), int)
        draws = np.random.default_rng(8)
        while (done < LENGTH).any():
            # Every row takes a chunk of its own size, some none, in a shape that all have.
            counts = np.minimum(draws.integers(0, 9, len(PROMPTS)), LENGTH - done)
            there = np.arange(8) < counts[:, None]
            positions = np.where(there, done[:, None] + np.arange(8), -1).astype(np.int32)
            chunk = np.where(there, np.take_along_axis(ids, positions, axis=1), 30)
            new, cache = chunk_logits(decoder, chunk, positions, cache)
            for row, count in enumerate(counts):
                logits[row, done[row] : done[row] + count] = np.asarray(new)[row, :count]
            done += counts
        assert_within_rounding(logits, true, what="in chunks")
        results.append(logits)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["window", "gemma"])
def test_the_tolerance_notices_a_window_off_by_one(name):
    parameters, decoder = make(name)
    wider = dataclasses.replace(
        MODELS[name],
        stacks=stacked(
            *(
                dataclasses.replace(
                    block,
                    mixer=dataclasses.replace(
                        block.mixer, window=block.mixer.window and block.mixer.window + 1
                    ),
                )
                for block in MODELS[name].blocks
            ),
            num_layers=MODELS[name].num_layers,
        ),
    )
    ids = np.random.default_rng(0).integers(0, 31, (len(PROMPTS), LENGTH)).astype(np.int32)
    true = oracle(parameters, wider, ids, PolicyName.FP32)
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(uncached_logits(decoder, ids), true)


@pytest.mark.parametrize(("name", "policy"), [("gqa", PolicyName.FP32), ("gemma", PolicyName.BF16)])
def test_cache_bytes(name, policy):
    _, decoder = make(name, policy)
    cache = decoder.empty_cache(batch=3, num_slots=40)
    itemsize = POLICIES[policy].compute.itemsize
    expected = 3 * cached_numbers(MODELS[name], 40, evicted=False)[0] * itemsize
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == expected


def test_windows_bound_what_has_to_be_kept():
    config = MODELS["gemma"]  # two layers of each kind, one with a window of 6
    assert cached_numbers(config, 40, evicted=False)[0] == 2 * (2 * 2 * 8 + 2 * 1 * 8) * 40
    kept = 2 * (2 * 2 * 8 * 6 + 2 * 1 * 8 * 40)
    assert cached_numbers(config, 40, evicted=True)[0] == kept


def test_decoding_keeps_one_cache():
    _, decoder = make("gqa")
    batch, num_slots = 2, 8192
    cache = tuple(
        after_pass(each, each.arrays)
        for each in decoder.empty_cache(batch=batch, num_slots=num_slots)
    )

    def step(decoder: Decoder, ids_B1, positions_B1, cache):
        out = decoder.run(ids_B1, positions=positions_B1, cache=cache)
        return decoder.logits(out.x), out.cache

    ids = jnp.zeros((batch, 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=3).lower(decoder, ids, ids, cache).compile()
    cache_bytes = batch * cached_numbers(MODELS["gqa"], num_slots, evicted=False)[0] * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    # One layer's slice of two, and scores: a second cache would show.
    assert memory.temp_size_in_bytes < cache_bytes


def test_adapters_of_latents_are_in_both_forms_of_attention():
    """Expanded, an adapter is beside the projection; absorbed, in the weight."""
    lora = LoraConfig(rank=2, targets=("kv_up", "query_up"))
    config = MODELS["latent"]
    blocks = config.stacks[0].pattern[:1]
    config = dataclasses.replace(config, stacks=stacked(*blocks, num_layers=1))
    definition = define_model(config, execution_on(), lora=lora)
    decoder = definition.bind(drawn(definition))
    ids = np.random.default_rng(seeded(0)).integers(0, 31, (2, 8)).astype(np.int32)
    want = np.asarray(uncached_logits(decoder, ids))
    plain = define_model(config, execution_on())
    without = plain.bind(only(drawn(definition), plain.shapes))
    assert np.abs(np.asarray(uncached_logits(without, ids)) - want).max() > 0.1
    cache = decoder.empty_cache(batch=2, num_slots=LENGTH)
    got = []
    for t in range(ids.shape[1]):
        positions = np.full((2, 1), t, np.int32)
        new, cache = decode_logits(decoder, ids[:, t : t + 1], positions, cache)
        got.append(np.asarray(new))
    # The two forms sum alike many products of some tens of terms.
    np.testing.assert_allclose(np.stack(got, axis=1), want, rtol=2e-5, atol=2e-5)
