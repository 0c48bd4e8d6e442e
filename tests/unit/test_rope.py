"""Rotary embedding: properties for all inputs, scalings against formulas from the papers."""

import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RopeConfig,
    YarnScaling,
    check_rope,
)
from jaxinfra.errors import ConfigError
from jaxinfra.model.rope import apply_rope, rope_frequencies, rope_table

EPSILON = float(np.finfo(np.float32).eps)
LLAMA31 = Llama3Scaling(
    factor=8.0,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
    original_max_positions=8192,
)
YARN = YarnScaling(factor=4.0, original_max_positions=4096)
SCALINGS = {
    "none": None,
    "linear": LinearScaling(factor=4.0),
    "ntk": NtkScaling(factor=4.0),
    "llama3": LLAMA31,
    "yarn": YARN,
}
settings = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)


def rotate(x_H: np.ndarray, position: int, config: RopeConfig) -> np.ndarray:
    """One vector at one position."""
    table = rope_table(config, head_dim=x_H.size, positions_BT=jnp.array([[position]]))
    return np.asarray(apply_rope(jnp.asarray(x_H, jnp.float32)[None, None, None], table))[0, 0, 0]


def vectors(seed: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, width)).astype(np.float32)


positions = st.integers(0, 20_000)
widths = st.sampled_from([4, 8, 64, 128])
configs = st.sampled_from(
    [
        RopeConfig(theta=theta, scaling=scaling)
        for theta in (10_000.0, 500_000.0)
        for scaling in SCALINGS.values()
    ]
)


@settings
@hypothesis.given(st.integers(0, 99), widths, configs, positions, positions, positions)
def test_score_depends_on_the_distance_only(seed, width, config, m, n, shift):
    q, k = vectors(seed, width)

    def score(m, n):
        return float(rotate(q, m, config).astype(float) @ rotate(k, n, config).astype(float))

    # An fp32 angle p theta is off by up to eps p theta / 2 (theta <= 1), both products and the
    # frequency rounded; a score moves by that angle times |q| |k|, twice over for two vectors.
    largest = max(m, n) + shift
    _, factor = rope_frequencies(config, head_dim=width)
    size = factor**2 * np.linalg.norm(q) * np.linalg.norm(k)
    assert abs(score(m, n) - score(m + shift, n + shift)) <= 4 * EPSILON * (largest + 10) * size


def test_pairs_turn_by_base_to_the_minus_2i_over_d():
    frequencies, factor = rope_frequencies(RopeConfig(theta=10_000.0), head_dim=8)
    assert frequencies == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0
    # Pair i is (i, i + d/2), turned counter-clockwise.
    x = np.zeros(8, np.float32)
    x[1] = 1.0
    got = rotate(x, 7, RopeConfig())
    want = np.zeros(8)
    want[1], want[5] = math.cos(0.7), math.sin(0.7)
    np.testing.assert_allclose(got, want, atol=4 * EPSILON)


def wavelengths(theta: float, width: int) -> np.ndarray:
    return 2 * np.pi * theta ** (np.arange(0, width, 2) / width)


def llama3_by_cases(theta: float, width: int, s: Llama3Scaling) -> np.ndarray:
    """Llama 3.1's reference code: three cases by wavelength."""
    result = []
    for wavelength in wavelengths(theta, width):
        frequency = 2 * np.pi / wavelength
        if wavelength < s.original_max_positions / s.high_frequency_factor:
            result.append(frequency)
        elif wavelength > s.original_max_positions / s.low_frequency_factor:
            result.append(frequency / s.factor)
        else:
            smooth = (s.original_max_positions / wavelength - s.low_frequency_factor) / (
                s.high_frequency_factor - s.low_frequency_factor
            )
            result.append((1 - smooth) * frequency / s.factor + smooth * frequency)
    return np.array(result)


def yarn_by_parts(theta: float, width: int, s: YarnScaling) -> np.ndarray:
    """YaRN equations 19 to 23 in its code's form: a ramp over dims between two rotation counts."""

    def dim_of(rotations: float) -> float:
        return (width * math.log(s.original_max_positions / (rotations * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    frequencies = 2 * np.pi / wavelengths(theta, width)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return frequencies / s.factor * ramp + frequencies * (1 - ramp)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("width", [64, 128])
def test_scalings_are_their_papers_formulas(theta, width):
    def frequencies(scaling):
        return rope_frequencies(RopeConfig(theta=theta, scaling=scaling), head_dim=width)[0]

    plain = 2 * np.pi / wavelengths(theta, width)
    np.testing.assert_allclose(frequencies(LinearScaling(factor=4.0)), plain / 4)
    ntk_base = theta * 4.0 ** (width / (width - 2))
    np.testing.assert_allclose(
        frequencies(NtkScaling(factor=4.0)), 2 * np.pi / wavelengths(ntk_base, width)
    )
    np.testing.assert_allclose(frequencies(LLAMA31), llama3_by_cases(theta, width, LLAMA31))
    for truncate in (True, False):
        yarn = YarnScaling(factor=16.0, original_max_positions=4096, truncate=truncate)
        np.testing.assert_allclose(frequencies(yarn), yarn_by_parts(theta, width, yarn))


def test_what_each_scaling_is_for():
    """NTK keeps the fastest pair and slows the slowest by the factor exactly; YaRN and Llama 3 do
    both exactly at the ends.
    """
    plain, _ = rope_frequencies(RopeConfig(), head_dim=128)
    for name, scaling in SCALINGS.items():
        if name in ("ntk", "llama3", "yarn"):
            scaled, _ = rope_frequencies(RopeConfig(scaling=scaling), head_dim=128)
            ratio = plain / scaled
            assert ratio[0] == pytest.approx(1.0)
            assert ratio[-1] == pytest.approx(scaling.factor)
            assert np.all(np.diff(ratio) >= -1e-12)


def test_dynamic_scaling_stretches_the_base_by_the_length():
    """Within the original context nothing is stretched. A longer row has the frequencies of
    NTK-aware scaling by the factor that its length gives.
    """
    dynamic = RopeConfig(scaling=DynamicScaling(factor=2.0, original_max_positions=16))
    positions = jnp.arange(48).reshape(2, 24)  # of rows that are 24 and 48 tokens long
    contexts = jnp.array([16, 48])
    for given, lengths in ((contexts, (16, 48)), (None, (24, 48))):
        found = rope_table(dynamic, head_dim=8, positions_BT=positions, contexts_B=given)
        for row, length in enumerate(lengths):
            factor = 2.0 * length / 16 - 1.0
            scaling = NtkScaling(factor=factor) if factor > 1.0 else None
            wanted = rope_table(
                RopeConfig(scaling=scaling), head_dim=8, positions_BT=positions[row : row + 1]
            )
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose(got[row : row + 1], want, atol=2e-5)


def test_llama_3_scaling_without_a_ramp_is_a_step():
    """Llama 4 gives one number as both bounds. Pairs that turn more often keep their frequency, and
    the frequencies of the others are divided by the factor.
    """
    step = Llama3Scaling(
        factor=16.0,
        low_frequency_factor=1.0,
        high_frequency_factor=1.0,
        original_max_positions=64,
    )
    plain, _ = rope_frequencies(RopeConfig(), head_dim=8)
    found, _ = rope_frequencies(RopeConfig(scaling=step), head_dim=8)
    turns = 64 * plain / (2 * math.pi)
    np.testing.assert_allclose(found, np.where(turns > 1.0, plain, plain / 16.0))


def test_dynamic_scaling_asks_for_two_pairs():
    with pytest.raises(ConfigError, match="2 elements"):
        check_rope(
            RopeConfig(scaling=DynamicScaling(factor=2.0, original_max_positions=16)), head_dim=2
        )


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        (YARN, 0.1 * math.log(4.0) + 1.0),
        (YarnScaling(factor=4.0, original_max_positions=4096, attention_factor=1.25), 1.25),
        (YarnScaling(factor=1.0, original_max_positions=4096), 1.0),
    ],
)
def test_yarn_temperature(scaling, factor):
    config = RopeConfig(scaling=scaling)
    assert rope_frequencies(config, head_dim=64)[1] == pytest.approx(factor)
    # Queries and keys carry it each: scores grow by its square.
    x = np.ones(64, np.float32)
    assert rotate(x, 9, config) @ rotate(x, 9, config) == pytest.approx(64 * factor**2, rel=1e-5)
