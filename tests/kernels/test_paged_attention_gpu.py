"""The shared cases of paged attention on a Hopper GPU; NaN lies wherever nobody put anything."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import append_heads, paged_attention
from pallas_kernels.paged_attention import numbers_of
from pallas_kernels.paged_attention.hopper.chunk import is_chunk
from pallas_kernels.quantized_weight import WeightCode
from tests.kernels import paged_cases as cases
from tests.kernels import test_append_heads as appended
from tests.kernels.test_paged_attention import run
from tests.kernels.test_paged_attention_hopper import call_of
from tests.tolerance import assert_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

FP16 = ("pages-16", "everything")
LONG = cases.PagedCase(
    name="long", lengths=(9000, 1, 64, 0, 5000), N=16, K=2, H=128, size=64, sinks=True
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(case.name, "bfloat16") for case in cases.CASES] + [(name, "float16") for name in FP16],
)
def test_kernels_are_the_definition(name, dtype):
    case = cases.NAMED[name]
    arguments, arrays = case.arrays(dtype)
    got = run(case, arguments, arrays, "hopper")
    assert_within_rounding(got, cases.expected(case, arguments, arrays))


@pytest.mark.parametrize("case", cases.CHUNKS, ids=lambda case: case.name)
def test_chunks_are_the_definition(case):
    # Enough tiles for the kernel for chunks.
    case = dataclasses.replace(case, N=16 * case.N, K=4 * case.K, lengths=2 * case.lengths)
    if case.query_lengths is not None:
        case = dataclasses.replace(case, query_lengths=2 * case.query_lengths)
    arguments, arrays = case.arrays("bfloat16")
    assert is_chunk(call_of(case, arguments, arrays))
    got = run(case, arguments, arrays, "hopper")
    assert_within_rounding(got, cases.expected(case, arguments, arrays))
    np.testing.assert_array_equal(got, run(case, arguments, arrays, "hopper"))


CODED = (
    "pages-16", "pages-32", "pages-64", "pages-128", "empty-rows", "window", "window-of-one", "cap",
    "sinks", "everything", "chunk", "more-queries-than-keys", "heads-of-three",
)  # fmt: skip
MANY = cases.PagedCase(name="many", lengths=(90, 40), T=20, query_lengths=(20, 7))


@pytest.mark.parametrize("code", [WeightCode.E4M3, WeightCode.INT8, WeightCode.INT4])
@pytest.mark.parametrize("name", [*CODED, "long", "many"])
def test_caches_in_few_bits_are_codes_times_scales(name, code):
    """Numbers of a call with many queries are rounded, as its rows become pages of 16 bits."""
    case = (cases.NAMED | {"long": LONG, "many": MANY})[name]
    # Scales of a page are copied in 128 bytes at least.
    case = dataclasses.replace(case, size=max(case.size, 64 // case.K))
    arguments, arrays = case.arrays("bfloat16")
    given, scales, true = cases.coded(arguments, code, rounds=name == "many")
    got = run(case, given, arrays | scales, "hopper")
    want = cases.expected(case, true, arrays)
    assert_within_rounding(got, want)
    np.testing.assert_array_equal(got, run(case, given, arrays | scales, "hopper"))
    if name == "long":
        another = {"v_scale": np.roll(scales["v_scale"], 1, 1)}
        with pytest.raises(AssertionError):
            assert_within_rounding(run(case, given, arrays | scales | another, "hopper"), want)


def test_long_rows_are_split_and_repeat_bit_for_bit():
    arguments, arrays = LONG.arrays("bfloat16")
    got = run(LONG, arguments, arrays, "hopper")
    assert_within_rounding(got, cases.expected(LONG, arguments, arrays))
    for _ in range(10):
        np.testing.assert_array_equal(got, run(LONG, arguments, arrays, "hopper"))


def test_other_lengths_compile_nothing():
    arguments, _ = LONG.arrays("bfloat16")
    q, k, v, tables, lengths = (jnp.asarray(x) for x in arguments)
    traces = []

    @jax.jit
    def step(lengths):
        traces.append(1)
        return paged_attention(q, k, v, tables, lengths, implementation="hopper")

    for shorter in (0, 1, 700):
        other = jnp.maximum(lengths - shorter, 0)
        case = dataclasses.replace(LONG, lengths=tuple(other.tolist()), sinks=False)
        want = cases.expected(case, (*arguments[:4], np.asarray(other)), {})
        assert_within_rounding(step(other), want)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "case",
    [{}, {"T": 1, "N": 32, "K": 8}, {"H": 128, "N": 32, "K": 8}, {"H": 256, "dtype": "float16"}],
    ids=str,
)
def test_heads_are_appended_in_place(case):
    arguments = appended.operands(**case)
    want_q, want_k, want_v = appended.definition(*arguments)
    heads, k, v, *rest = arguments
    append = jax.jit(append_heads, static_argnames="implementation", donate_argnums=(1, 2))
    q, k, v = append(heads, jnp.copy(k), jnp.copy(v), *rest, implementation="hopper")
    is_there = arguments[4] >= 0
    assert_within_rounding(q[is_there], want_q[is_there])
    assert_within_rounding(k, want_k)
    np.testing.assert_array_equal(np.asarray(v, np.float64), want_v)


@pytest.mark.parametrize("code", [WeightCode.E4M3, WeightCode.INT8, WeightCode.INT4])
@pytest.mark.parametrize("width", [64, 128])
def test_heads_are_appended_in_few_bits(code, width):
    """As XLA does it, but for ties: quotients are rounded otherwise."""
    heads, _, _, *rest = appended.operands(N=32, K=8, H=width)
    pool, scales = appended.coded_pools(code, num_kv=8, width=width)
    append = jax.jit(append_heads, static_argnames="implementation")
    want = append(heads, pool, pool, *rest, **scales, implementation="xla")
    got = append(heads, pool, pool, *rest, **scales, implementation="hopper")
    for pages in (1, 2):
        mine, true = (
            np.asarray(numbers_of(x[pages], x[pages + 2], code, jnp.dtype(jnp.float32)))
            for x in (got, want)
        )
        largest = np.abs(true).max(-1, keepdims=True)
        step = np.abs(true) / 8 + largest / 448 if code is WeightCode.E4M3 else largest / 7
        assert (np.abs(mine - true) <= step).all()
        assert np.mean(mine == true) > 0.99
