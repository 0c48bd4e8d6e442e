"""Bias, penalties, masks and log-probabilities of a draw, against the formulas in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.errors import ConfigError
from jaxinfra.serving.sampling import (
    GREEDY,
    NO_TOKEN,
    SamplingConfig,
    SamplingNeeds,
    SamplingRows,
    TokenHistory,
    log_probabilities,
    sample,
)

IDS = 40
PROMPT, DRAWN = (3, 5, 5, 8), (8, 9, 9, 9, 2)
CONFIGS = [
    GREEDY,
    SamplingConfig(temperature=0.0, repetition_penalty=1.8),
    SamplingConfig(temperature=0.0, repetition_penalty=0.5),
    SamplingConfig(temperature=0.0, presence_penalty=1.1),
    SamplingConfig(temperature=0.0, frequency_penalty=-0.7),
    SamplingConfig(temperature=0.0, logit_bias=((7, 9.0), (1, -np.inf))),
    SamplingConfig(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((9, 4.0),),
    ),
]


draw = jax.jit(sample, static_argnames="needs")


@functools.partial(jax.jit, static_argnames="batch")
def history(batch: int) -> TokenHistory:
    ids = jnp.array((*PROMPT, *DRAWN), jnp.int32)
    made = TokenHistory.empty(batch=batch, num_ids=IDS)
    for row in range(batch):
        made = made.begin(
            jnp.int32(row), ids, num_prompt=jnp.int32(len(PROMPT)), num_tokens=jnp.int32(ids.size)
        )
    return made


def expected_logits(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    logits = logits.astype(np.float64)
    for token, bias in config.logit_bias:
        logits[token] += bias
    for token in {*PROMPT, *DRAWN}:
        repetition = config.repetition_penalty
        logits[token] *= repetition if logits[token] < 0 else 1 / repetition
    for token in DRAWN:
        logits[token] -= config.frequency_penalty
    for token in set(DRAWN):
        logits[token] -= config.presence_penalty
    return logits


def test_penalties_and_bias_move_the_logits_by_their_formulas():
    rng = np.random.default_rng(0)
    rows, needs = SamplingRows.of(CONFIGS), SamplingNeeds.of(CONFIGS)
    assert needs == SamplingNeeds(bias=True, penalties=True)
    keys = jax.random.split(jax.random.key(0), len(CONFIGS))
    changed = 0
    for _ in range(50):
        logits = rng.normal(size=(len(CONFIGS), IDS)).astype(np.float32)
        got = draw(logits, keys, rows=rows, needs=needs, history=history(len(CONFIGS)))
        want = [
            int(np.argmax(expected_logits(row, config)))
            for row, config in zip(logits, CONFIGS, strict=True)
        ]
        assert got.ids_B.tolist() == want
        changed += sum(np.argmax(logits, axis=1) != want)
    assert changed > 50, "these settings would have shown nothing"


def test_a_row_begun_again_has_the_history_it_had():
    batch, ids = 3, np.array([*PROMPT, *DRAWN, 30, 30], np.int32)
    whole = history(batch)
    other = dataclasses.replace(whole, sampled_BV=whole.sampled_BV.at[1, 33].add(1))
    num_prompt, num_tokens = np.int32([len(PROMPT), len(PROMPT) + len(DRAWN)])
    again = jax.jit(TokenHistory.begin)(
        other, np.int32(1), ids, num_prompt=num_prompt, num_tokens=num_tokens
    )
    np.testing.assert_array_equal(again.sampled_BV, whole.sampled_BV)
    np.testing.assert_array_equal(again.in_prompt_BV, whole.in_prompt_BV)


def test_a_mask_of_bits_says_what_may_be_drawn():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, IDS)).astype(np.float32)
    allowed = rng.integers(0, 2, (4, IDS)).astype(bool)
    allowed[3] = False
    bits = np.zeros((4, 64), np.uint8)
    bits[:, :IDS] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    keys = jax.random.split(jax.random.key(0), 4)
    greedy = {"rows": SamplingRows.of([GREEDY] * 4), "needs": SamplingNeeds()}
    got = draw(logits, keys, allowed_BW=words, **greedy)
    want = np.argmax(np.where(allowed, logits, -np.inf), axis=1)
    # Nothing is left to draw in the last: whoever asked must be told.
    assert got.ids_B.tolist() == [*want[:3].tolist(), NO_TOKEN]


@pytest.mark.parametrize("num_ids", [IDS, 5000], ids=["one-block", "blocks"])
def test_log_probabilities_are_the_models_own(num_ids):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, num_ids)).astype(np.float32)
    logits[0, [7, 17, 27]] = 9.0  # equals: lower ids first
    ids = np.array([1, 17, 5], np.int32)
    got = jax.jit(log_probabilities, static_argnames="num_top")(logits, ids, num_top=20)
    wide = logits.astype(np.float64)
    true = wide - np.log(np.sum(np.exp(wide), axis=1, keepdims=True))
    order = np.argsort(-wide, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(got.top_ids_BK, order)
    # fp32: the sum of exponentials to log2(V) roundings, then a difference of numbers below 16.
    bound = (np.log2(num_ids) + 4) * 2.0**-24 * 16
    np.testing.assert_allclose(got.top_BK, np.take_along_axis(true, order, 1), atol=bound, rtol=0)
    np.testing.assert_allclose(got.chosen_B, true[np.arange(3), ids], atol=bound, rtol=0)
    assert SamplingNeeds.of([GREEDY, SamplingConfig(logprobs=3)]).logprobs == 3
    drawn = draw(
        logits, jax.random.split(jax.random.key(0), 3),
        rows=SamplingRows.of([SamplingConfig(temperature=0.0, logit_bias=((4, 50.0),))] * 3),
        needs=SamplingNeeds(bias=True, logprobs=0),
    )  # fmt: skip
    assert drawn.ids_B.tolist() == [4] * 3
    assert drawn.logprobs is not None
    np.testing.assert_allclose(drawn.logprobs.chosen_B, true[:, 4], atol=bound, rtol=0)


def test_bias_has_as_much_room_as_it_is_given():
    config = SamplingConfig(logit_bias=((3, 1.0), (4, 1.0)))
    assert SamplingRows.of([config, GREEDY], num_biases=5).bias_BE.shape == (2, 5)
    with pytest.raises(ConfigError, match="room for 1"):
        SamplingRows.of([config], num_biases=1)
    with pytest.raises(ConfigError, match="named once"):
        SamplingConfig(logit_bias=((3, 1.0), (3, 2.0)))
