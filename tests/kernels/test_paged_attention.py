"""Paged attention off Hopper: the loop and the formula against the definition, calls, appending."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import InputError, append_to_pages, paged_attention
from pallas_kernels.quantized_weight import WeightCode
from tests.kernels import paged_cases as cases
from tests.rounding import Rounded
from tests.tolerance import assert_within_rounding

BF16 = ("pages-64", "everything")
BY_FORMULA = ("pages-16", "empty-rows", "everything", "chunk")
GRID = [
    *((case.name, "float32", "xla") for case in cases.CASES),
    *((name, "bfloat16", "xla") for name in BF16),
    *((name, "float32", "reference") for name in BY_FORMULA),
    ("everything", "bfloat16", "reference"),
]


def run(case, arguments, arrays, implementation):
    f = functools.partial(paged_attention, **case.options, implementation=implementation)
    return jax.jit(f)(*arguments, **arrays)


@pytest.mark.parametrize(("name", "dtype", "implementation"), GRID)
def test_is_the_definition(name, dtype, implementation):
    case = cases.NAMED[name]
    arguments, arrays = case.arrays(dtype)
    got = run(case, arguments, arrays, implementation)
    assert_within_rounding(got, cases.expected(case, arguments, arrays))


CODED = [
    ("everything", WeightCode.INT4, "xla"),
    ("pages-64", WeightCode.E4M3, "xla"),
    ("everything", WeightCode.INT8, "reference"),
]


@pytest.mark.slow_cases("pages-64-e4m3-xla")
@pytest.mark.parametrize(("name", "code", "implementation"), CODED)
def test_caches_in_few_bits_are_codes_times_scales(name, code, implementation):
    case = cases.NAMED[name]
    arguments, arrays = case.arrays("float32")
    (q, k, v, *rest), scales, true = cases.coded(arguments, code, rounds=True)
    want = cases.expected(case, true, arrays)
    attend = jax.jit(
        functools.partial(paged_attention, **case.options, implementation=implementation)
    )
    assert_within_rounding(attend(q, k, v, *rest, **scales, **arrays), want)
    another_token = {"k_scale": np.roll(scales["k_scale"], 1, 1)}
    with pytest.raises(AssertionError):
        assert_within_rounding(attend(q, k, v, *rest, **scales | another_token, **arrays), want)
    if code is WeightCode.INT4:
        swapped = v >> 4 | v << 4
        with pytest.raises(AssertionError):
            assert_within_rounding(attend(q, k, swapped, *rest, **scales, **arrays), want)


def test_many_queries_go_in_blocks():
    case = cases.PagedCase(name="", lengths=(150, 140), T=140, query_lengths=(140, 133), N=2, K=1)
    arguments, arrays = case.arrays("float32")
    assert_within_rounding(
        run(case, arguments, arrays, "xla"), cases.expected(case, arguments, arrays)
    )


def test_a_query_a_row_needs_no_dim_of_its_own():
    case = cases.NAMED["pages-16"]
    (q, *rest), _ = case.arrays("float32")
    attend = jax.jit(paged_attention)
    np.testing.assert_array_equal(attend(q[:, 0], *rest), np.asarray(attend(q, *rest))[:, 0])


def test_memory_is_that_of_a_few_pages():
    """What the loop gathers at a time does not grow with the rows' tables."""
    shape = jax.ShapeDtypeStruct

    def temporaries(num_pages):
        arguments = (
            shape((4, 8, 64), jnp.float32),
            shape((4 * num_pages, 64, 2, 64), jnp.float32),
            shape((4 * num_pages, 64, 2, 64), jnp.float32),
            shape((4, num_pages), jnp.int32),
            shape((4,), jnp.int32),
        )
        compiled = jax.jit(functools.partial(paged_attention, implementation="xla"))
        return compiled.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(512) < 1.1 * temporaries(64)


ARGUMENTS = ("q", "k_pages", "v_pages", "page_tables", "lengths")
FAULTS = {
    "a page skipped": lambda given: {"page_tables": given["page_tables"][:, [0, 0, 2, 3, 4]]},
    "a length short by one": lambda given: {"lengths": given["lengths"] - 1},
    "another kv head": lambda given: {"k_pages": given["k_pages"][:, :, ::-1]},
}


@pytest.mark.slow  # of the bound, a program for each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, dtype):
    case = cases.NAMED["pages-64"]
    arguments, arrays = case.arrays(dtype)
    want = cases.expected(case, arguments, arrays)
    given = dict(zip(ARGUMENTS, arguments, strict=True))
    faulty = tuple((given | FAULTS[fault](given)).values())
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(run(case, faulty, arrays, "xla"), want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window=0 must be an int of at least 1"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0 must be a positive"),
        ({"v_pages": jnp.zeros((19, 16, 1, 64))}, r"must agree in \[P,S,K\]"),
        ({"q": jnp.zeros((4, 5, 64))}, "5 query heads must share the 2 kv heads"),
        ({"q": jnp.zeros((4, 8, 64), jnp.bfloat16)}, "k_pages is float32 and q is bfloat16"),
        ({"lengths": jnp.zeros(4)}, "lengths is float32"),
        ({"sinks": jnp.zeros(3)}, "must be one float per head"),
        ({"implementation": "cudnn"}, "implementation='cudnn' is unknown; choose auto"),
        ({"k_scale": jnp.zeros((19, 16, 2))}, "k_scale and v_scale come together"),
        (
            {"k_scale": jnp.zeros((19, 16, 2)), "v_scale": jnp.zeros((19, 16, 2))},
            "with scales both must be",
        ),
        (
            {
                **dict.fromkeys(("k_pages", "v_pages"), jnp.zeros((19, 16, 2, 64), jnp.int8)),
                **dict.fromkeys(("k_scale", "v_scale"), jnp.zeros((19, 16))),
            },
            "a number for each slot and head",
        ),
    ],
    ids=str,
)
def test_refuses(change, words):
    case = cases.NAMED["pages-16"]
    arguments, _ = case.arrays("float32")
    given = dict(zip(ARGUMENTS, arguments, strict=True))
    with pytest.raises(InputError, match=words):
        paged_attention(**given | change)


def test_appending_is_what_attention_reads():
    """Over the edge of a page, past the end, into a page that a row does not have, and padding."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((6, 16, 2, 8)).astype(np.float32)
    v = rng.standard_normal((6, 16, 2, 4)).astype(np.float32)
    tables = np.array([[3, 1], [5, -1]], np.int32)
    positions = np.array([[15, 16, -1], [14, 16, 40]], np.int32)
    k_new = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    v_new = rng.standard_normal((2, 3, 2, 4)).astype(np.float32)
    angles = rng.uniform(0, 6, (2, 3, 3)).astype(np.float32)
    rope = np.cos(angles), np.sin(angles)
    got = jax.jit(append_to_pages)(k_new, v_new, k, v, tables, positions, rope=rope)

    cos, sin = (Rounded(x[:, :, None]) for x in rope)
    first, second = Rounded(k_new[..., :3]), Rounded(k_new[..., 3:6])
    turned = np.concatenate(
        [first * cos - second * sin, second * cos + first * sin, Rounded(k_new[..., 6:])], axis=-1
    )
    want_k, want_v = Rounded(k), np.copy(v)
    for page, slot, row, token in ((3, 15, 0, 0), (1, 0, 0, 1), (5, 14, 1, 0)):
        want_k[page, slot] = turned[row, token]
        want_v[page, slot] = v_new[row, token]
    assert_within_rounding(got[0], want_k)
    np.testing.assert_array_equal(got[1], want_v)
