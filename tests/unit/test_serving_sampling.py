"""Sampling draws from the distribution its config describes, and from nothing else."""

import functools

import chex
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
    gumbel_noise,
    gumbel_of_bits,
    sample,
)

DRAWS = 20_000
FEW = 256  # where nothing is counted
# All tests draw from 12 logits: few shapes, few compilations.
TIED = np.array([1.0, 2.0, 2.0, 0.5, 2.0, 1.0, *[0.0] * 6], np.float32)
RANDOM = np.random.default_rng(0).normal(size=12).astype(np.float32) * 2
MIXED = SamplingConfig(temperature=1.7, top_k=6, top_p=0.7)
CUTS = SamplingNeeds(noise=True, cuts=True)
SETTINGS = [
    GREEDY,
    SamplingConfig(),
    SamplingConfig(temperature=0.3),
    SamplingConfig(top_k=3),
    SamplingConfig(top_p=0.6),
    MIXED,
]


@jax.jit
@chex.assert_max_traces(n=4)
def _sample(logits, keys, rows):
    """Traced once for each shape that these tests draw from, whatever the settings."""
    return sample(logits, keys, rows=rows, needs=CUTS).ids_B


@functools.partial(jax.jit, static_argnames="needs")
def _sample_needed(logits, keys, rows, *, needs):
    """What is not needed is not computed."""
    return sample(logits, keys, rows=rows, needs=needs).ids_B


def draws(logits: np.ndarray, config: SamplingConfig, *, num: int = DRAWS) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), num)
    rows = SamplingRows.of([config] * num)
    ids = _sample(jnp.broadcast_to(logits[None], (num, logits.size)), keys, rows)
    assert ids.dtype == jnp.int32
    return np.asarray(ids)


def expected(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Probability of every token in float64; lower ids first among equals."""
    logits = logits.astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    kept = order[: config.top_k]
    weights = np.exp((logits[kept] - logits.max()) / config.temperature)
    if config.min_p is not None:
        weights = weights[weights >= config.min_p]  # the first is 1
        kept = kept[: len(weights)]
    weights /= weights.sum()
    if config.top_p is not None:
        count = 1
        while count < len(kept) and weights[:count].sum() < config.top_p:
            count += 1
        kept, weights = kept[:count], weights[:count]
    probabilities = np.zeros(logits.size)
    probabilities[kept] = weights / weights.sum()
    return probabilities


@pytest.mark.slow_cases("all", "free", "hot", "min-p", "ties-top-k-4", "top-k", "top-p")
@pytest.mark.parametrize(
    ("logits", "config"),
    [
        (RANDOM, SamplingConfig()),
        (RANDOM, SamplingConfig(temperature=0.5)),
        (RANDOM, SamplingConfig(temperature=3.0)),
        (RANDOM, SamplingConfig(top_k=4)),
        (RANDOM, SamplingConfig(top_p=0.8)),
        (RANDOM, SamplingConfig(top_p=1.0, top_k=1000)),
        (RANDOM, MIXED),
        (RANDOM, SamplingConfig(min_p=0.2)),
        (RANDOM, SamplingConfig(min_p=0.05, top_k=9, top_p=0.8)),
        (TIED, SamplingConfig(top_k=2)),
        (TIED, SamplingConfig(top_k=4)),
        (TIED, SamplingConfig(top_p=0.5)),
    ],
    ids=[
        "free", "cold", "hot", "top-k", "top-p", "all", "mixed", "min-p", "min-p-mixed",
        "ties-top-k-2", "ties-top-k-4", "ties-top-p",
    ],
)  # fmt: skip
def test_frequencies(logits, config):
    probabilities = expected(logits, config)
    counts = np.bincount(draws(logits, config), minlength=logits.size)
    kept = probabilities > 0
    assert not counts[~kept].any(), "drew a token that the config cuts"
    mean = DRAWS * probabilities[kept]
    chi_square = np.sum((counts[kept] - mean) ** 2 / mean)
    freedom = kept.sum() - 1
    # Mean and variance of chi-square are its degrees of freedom and twice that.
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom), (counts[kept], mean)


@pytest.mark.parametrize(
    "config",
    [
        GREEDY,
        SamplingConfig(temperature=0.0, top_k=3, top_p=0.5),
        SamplingConfig(top_k=1),
        SamplingConfig(top_p=1e-45),
    ],
    ids=["zero", "zero-cut", "top-1", "tiny-p"],
)
def test_narrowest_settings_are_greedy(config):
    for logits in (RANDOM, TIED, RANDOM * 1e30):
        assert set(draws(logits, config, num=64)) == {int(np.argmax(logits))}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
def test_tiny_temperatures_neither_overflow_nor_divide_by_zero(temperature):
    config = SamplingConfig(temperature=temperature)
    assert set(draws(RANDOM, config, num=64)) == {int(np.argmax(RANDOM))}
    assert set(draws(RANDOM * 1e37, config, num=64)) == {int(np.argmax(RANDOM))}
    # Equals stay equally likely, however cold.
    assert set(draws(TIED, config, num=64)) == {1, 2, 4}


def test_excluded_tokens_are_never_drawn():
    logits = RANDOM.copy()
    logits[::2] = -np.inf
    for config in (SamplingConfig(temperature=3.0), SamplingConfig(top_p=1.0, top_k=1000)):
        assert set(draws(logits, config)) == set(range(1, 12, 2))
    logits[1:] = -np.inf
    logits[0] = 0.0
    assert set(draws(logits, MIXED)) == {0}


def test_a_row_depends_on_itself_only():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(FEW, 12)).astype(np.float32)
    keys = jax.random.split(jax.random.key(4), FEW)
    order = rng.permutation(FEW)
    configs = [SETTINGS[i] for i in rng.integers(0, len(SETTINGS), FEW)]
    ids = np.asarray(_sample(rows, keys, SamplingRows.of(configs)))
    shuffled = SamplingRows.of([configs[i] for i in order])
    elsewhere = np.asarray(_sample(rows[order], keys[order], shuffled))
    np.testing.assert_array_equal(ids[order], elsewhere)
    # Alone among its like, a setting may take another program, which draws the same.
    for config in SETTINGS:
        needs = SamplingNeeds.of([config])
        of_like = SamplingRows.of([config] * FEW)
        alone = np.asarray(_sample_needed(rows, keys, of_like, needs=needs))
        mine = np.array([each is config for each in configs])
        assert mine.any()
        np.testing.assert_array_equal(ids[mine], alone[mine])


def test_cutting_the_tail_leaves_other_draws_as_they_were():
    free = draws(RANDOM, SamplingConfig())
    cut = draws(RANDOM, SamplingConfig(top_k=4))
    kept = np.isin(free, np.argsort(-RANDOM)[:4])
    assert 0 < kept.sum() < DRAWS
    np.testing.assert_array_equal(free[kept], cut[kept])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"logprobs": 21},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_settings_that_mean_nothing_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        SamplingConfig(**options)


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_nothing_is_drawn_from_logits_that_are_no_numbers(config):
    """And the other rows of the batch draw what they would."""
    spoilt = np.tile(RANDOM, (FEW, 1))
    spoilt[0, 7] = np.nan
    spoilt[1] = np.nan
    spoilt[2, 0] = np.inf
    spoilt[3] = -np.inf
    keys = jax.random.split(jax.random.key(0), FEW)
    ids = np.asarray(_sample(spoilt, keys, SamplingRows.of([config] * FEW)))
    assert ids[:4].tolist() == [NO_TOKEN] * 4
    np.testing.assert_array_equal(ids[4:], draws(RANDOM, config, num=FEW)[4:])


def test_noise_is_that_of_its_bits():
    """In fp32, beside the formula in fp64, which the first and the last bits are no end of."""
    rng = np.random.default_rng(8)
    high, low = (rng.integers(0, 2**32, 100_000, np.uint32) for _ in range(2))
    high[:6], low[:6] = [0, 0, 0, 1, 2**32 - 1, 2**31], [0, 1, 2**32 - 1, 0, 2**32 - 1, 5]
    got = np.asarray(gumbel_of_bits(jnp.asarray(high), jnp.asarray(low)), np.float64)
    x = (high.astype(np.float64) + (low + 0.5) / 2.0**32) / 2.0**32
    x = np.minimum(x, 1 - 2.0**-24)
    exponential = -np.log1p(-x)
    # x and log1p are each a few units off, which 1 - x makes of x near 1 some 1 / (1 - x) more;
    # the logarithm makes a relative error an absolute one.
    unit = 2.0**-24
    error = 4 * unit * (1 + x / ((1 - x) * exponential)) + 2 * unit * np.abs(np.log(exponential))
    assert np.all(np.abs(got + np.log(exponential)) <= error)
    assert got[0] > 45
    assert np.isfinite(got).all()


def test_noise_is_gumbel_s_and_of_row_and_id_alone():
    """By the distribution of 200,000 of them: Kolmogorov's bound, 1e-9 likely to be passed."""
    noise = np.asarray(gumbel_noise(jax.random.split(jax.random.key(7), 2), 100_000))
    values = np.sort(noise.reshape(-1).astype(np.float64))
    steps = np.arange(values.size + 1) / values.size
    cumulated = np.exp(-np.exp(-values))
    apart = max(np.max(steps[1:] - cumulated), np.max(cumulated - steps[:-1]))
    assert apart < np.sqrt(np.log(2 / 1e-9) / (2 * values.size))
    assert abs(np.corrcoef(noise)[0, 1]) < 6 / np.sqrt(100_000)
    few = np.asarray(gumbel_noise(jax.random.split(jax.random.key(7), 2)[1:], 300))
    np.testing.assert_array_equal(few[0], noise[1, :300])
