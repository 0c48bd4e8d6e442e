"""The kernel ladder without a GPU: values in the interpreter, lowering for every rung.

ptxas and the barriers' real timing are seen on a GPU only: ``make test-gpu``, and the benchmark,
whose stored results are held to say that every rung was right.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ladder import RUNGS, effects, elementwise, tensor_cores
from pallas_kernels.common.errors import InputError, UnsupportedError
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

ROOT = pathlib.Path(__file__).parents[2]


def operands(M, N, K):
    rng = np.random.default_rng(seeded(M + N + K))
    a, b = rng.normal(size=(M, K)), rng.normal(size=(K, N))
    return jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)


def assert_is_matmul(matmul, M, N, K):
    a, b = operands(M, N, K)
    oracle = Rounded(np.asarray(a, np.float64)) @ Rounded(np.asarray(b, np.float64))
    got = jax.block_until_ready(jax.jit(matmul)(a, b))
    assert_within_rounding(got, oracle)


# More steps than stages, so that places are used again; several blocks where they are cheap.
SHAPES = {
    "naive": (32, 8, 24),
    "coalesced": (8, 32, 24),
    "shared": (32, 32, 64),
    "registers": (128, 128, 48),
    "prefetched": (128, 128, 48),
    "tensor_core": (128, 128, 192),
    "pipelined": (128, 128, 320),
    "specialized": (128, 256, 384),
    "persistent": (128, 256, 384),
    "clustered": (256, 256, 320),
}
QUICK = ("prefetched", "pipelined", "clustered")


@pytest.mark.slow_cases("prefetched")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "rung",
    [pytest.param(r, marks=() if r.name in QUICK else pytest.mark.slow, id=r.name) for r in RUNGS],
)
def test_a_rung_multiplies(rung):
    assert_is_matmul(rung.matmul, *SHAPES[rung.name])


def lowers(f, *args):
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


@pytest.mark.slow_cases(
    "naive",
    "coalesced",
    "shared",
    "registers",
    "tensor_core",
    "pipelined",
    "specialized",
    "persistent",
)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_a_rung_lowers(rung):
    lowers(rung.matmul, SQUARE, SQUARE)


def test_effects_lower():
    x = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
    lowers(functools.partial(effects.every_nth, stride=8), x)
    lowers(functools.partial(effects.copy, width=4), x)
    lowers(functools.partial(effects.copy_with_few_warps, blocks=16, in_flight=4), x)
    lowers(effects.iterate, x, jax.ShapeDtypeStruct(x.shape, jnp.int32))


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        ((128, 64), (128, 64), InputError, r"are not \[M, K\]"),
        ((128, 64), (64, 100), UnsupportedError, "N=100"),
        ((100, 64), (64, 128), UnsupportedError, "128 x 128 x 64"),
        ((128, 40), (40, 128), UnsupportedError, "K=40"),
    ],
)
def test_a_rung_refuses(a, b, error, words):
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (a, b))
    with pytest.raises(error, match=words):
        jax.eval_shape(tensor_cores.tensor_core, a, b)


def elu_arrays():
    rng = np.random.default_rng(0)
    # Also the small negative ones, where exp(x) - 1 has no digits left.
    x = np.concatenate([rng.normal(size=2048), -(10.0 ** rng.uniform(-6, 1, 2048))])
    d_y = rng.normal(size=4096)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(d_y, jnp.bfloat16)


def elu_oracle(x, d_y):
    x, d_y = Rounded(np.asarray(x, np.float64)), Rounded(np.asarray(d_y, np.float64))
    return np.where(x > 0, x, np.expm1(x)), d_y * np.where(x > 0, 1, np.exp(x))


@pytest.mark.usefixtures("interpreter")
def test_elu_and_its_gradient_are_the_formula():
    x, d_y = elu_arrays()
    got = jax.block_until_ready(jax.jit(elementwise.elu_and_gradient)(x, d_y))
    oracle = elu_oracle(x, d_y)
    assert_within_rounding(got, oracle)
    assert_within_rounding(elementwise.elu_and_gradient_reference(x, d_y), oracle)
    # Small ones keep their digits: an error relative to the largest would not show it.
    relative = np.abs(np.asarray(got[0], np.float64) - oracle[0].value) / np.abs(oracle[0].value)
    assert relative.max() <= 2.0**-8
    value = jax.block_until_ready(jax.jit(functools.partial(elementwise.elu, vector=1))(x))
    np.testing.assert_array_equal(value, got[0])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("kernel", "want"),
    [
        (functools.partial(effects.every_nth, stride=4), lambda x: x[::4]),
        (functools.partial(effects.copy, width=2), lambda x: x),
        (functools.partial(effects.copy_with_few_warps, blocks=2, in_flight=2), lambda x: x),
    ],
    ids=["stride", "width", "few warps"],
)
def test_effects_move_what_they_should(kernel, want, monkeypatch):
    monkeypatch.setattr(effects, "NUM_PROCESSORS", 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    got = jax.block_until_ready(jax.jit(kernel)(x))
    np.testing.assert_array_equal(got, want(x))


def iterated(x, counts):
    """The distance from 2 halves each time; near a result of 0, two numbers cancel."""
    return 2.0 + (Rounded(x) - 2.0) * np.exp(Rounded(-np.log(2.0) * counts))


def test_what_is_stored_holds_the_bar_and_the_page_tells_it():
    rows = json.loads((ROOT / "experiments/results/ladder-h200.json").read_text())["rows"]
    page = (ROOT / "docs/kernel-ladder.md").read_text().splitlines()
    found = {row["name"]: row for row in rows}
    assert all(row["ok"] and row["repeats"] for row in rows if "ok" in row)
    for rung in RUNGS:
        sizes = [size for size in (4096, 8192) if f"rung {rung.name} {size}" in found]
        assert sizes, f"{rung.name} was not measured"
        told = next(line for line in page if f"| `{rung.name}` |" in line)
        for size in sizes:
            rate = found[f"rung {rung.name} {size}"]["tflops"]
            digits = f"{rate:.0f}" if rate > 100 else f"{rate:.1f}" if rate > 1 else f"{rate:.2f}"
            assert f" {digits} |" in told, f"{rung.name} at {size}: {digits} is not in {told}"
    for size in (4096, 8192):
        assert found[f"rung {RUNGS[-1].name} {size}"]["of_xla"] >= 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_a_rung_multiplies_on_a_gpu(rung):
    assert_is_matmul(rung.matmul, 512, 512, 512)


@pytest.mark.gpu
def test_loops_of_different_lengths_on_a_gpu():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 40, 4096), jnp.int32)
    got = jax.jit(effects.iterate)(x, counts)
    closed = effects.iterate_reference(x, counts)
    assert_within_rounding([got, closed], [iterated(np.asarray(x), np.asarray(counts))] * 2)
