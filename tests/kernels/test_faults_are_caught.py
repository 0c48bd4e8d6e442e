"""The tolerance is wide enough for rounding on any CPU and narrow enough for faults: each of these
fails it, in fp32 and in 16 bits.

Faults are put into calls and results of the real implementations, or into a plain NumPy program
where the package has nothing to switch off.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import attention_cases as cases
from tests.rounding import Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

DTYPES = ("float32", "bfloat16")
WINDOW = cases.NAMED["window"]
CAUSAL = cases.NAMED["causal"]
FAULTS = {
    "scale half a percent off": (CAUSAL, {"scale": 1.005 * CAUSAL.H**-0.5}),
    "a key too many on the left": (WINDOW, {"window": (14, 5)}),
    "a key too few on the right": (WINDOW, {"window": (13, 4)}),
    "the future": (CAUSAL, {"causal": False, "window": (None, 1)}),
    "last tile of keys dropped": (WINDOW, {"kv_lengths": (64, 64)}),
    "last key dropped": (CAUSAL, {"kv_lengths": (76, 76)}),
    "soft cap forgotten": (dataclasses.replace(CAUSAL, cap=30.0), {"cap": None}),
}


IN_BF16 = ("scale half a percent off", "a key too many on the left", "last key dropped")


@pytest.mark.slow  # of the bound, a program for each
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, "float32") for fault in FAULTS), *((fault, "bfloat16") for fault in IN_BF16)],
)
def test_attention_that_computes_another_function(fault, dtype):
    case, changes = FAULTS[fault]
    oracle = cases.expected(case, dtype)
    # The same name has the same operands.
    got = cases.run(
        dataclasses.replace(case, **changes), jnp.dtype(dtype), implementation="reference"
    )
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(got, oracle)


def products(dtype, accumulator, *, tile=16, skip=None):
    """a @ b tile by tile of the length, in an accumulator of its own; and its oracle."""
    rng = np.random.default_rng(seeded(0))
    a, b = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((64, 512), (512, 32)))
    total = np.zeros((64, 32), accumulator)
    for start in range(0, 512, tile):
        if start == skip:
            continue
        each = slice(start, start + tile)
        part = a[:, each].astype(np.float32) @ b[each].astype(np.float32)
        total = (total.astype(np.float32) + part).astype(accumulator)
    oracle = Rounded(a) @ Rounded(b)
    return jnp.asarray(total.astype(jnp.dtype(dtype))), oracle


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_fp32_passes(dtype):
    assert_within_rounding(*products(dtype, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fault",
    [
        {"accumulator": jnp.bfloat16},
        {"accumulator": jnp.float16},
        {"accumulator": np.float32, "skip": 496},
    ],
    ids=["bf16 accumulator", "fp16 accumulator", "dropped tile"],
)
def test_a_product_of_16_bit_sums_or_without_a_tile(fault, dtype):
    if dtype == "bfloat16" and fault["accumulator"] == jnp.float16:
        fault = fault | {"tile": 1}  # its 11 bits hide beneath a result's 8, unless they add up
    got, oracle = products(dtype, **fault)
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(got, oracle)


def test_tf32_operands():
    """Ten bits of mantissa, as tensor cores take where nothing forbids it."""
    rng = np.random.default_rng(seeded(0))
    a, b = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    short = [(x.view(np.int32) & ~0x1FFF).view(np.float32) for x in (a, b)]
    assert_within_rounding(jnp.asarray(a @ b), Rounded(a) @ Rounded(b))
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(jnp.asarray(short[0] @ short[1]), Rounded(a) @ Rounded(b))


@pytest.mark.parametrize("columns", [77, 2048])
def test_a_softmax_whose_sum_is_in_bf16(columns):
    x = np.random.default_rng(seeded(0)).standard_normal((4, columns)).astype(np.float32)
    exact = Rounded(x)
    power = np.exp(exact - exact.max(axis=-1, keepdims=True))
    exact = power / power.sum(axis=-1, keepdims=True)
    mine = np.exp(x - x.max(axis=-1, keepdims=True))
    assert_within_rounding(jnp.asarray(mine / mine.sum(axis=-1, keepdims=True)), exact)
    rough = mine.sum(axis=-1, keepdims=True).astype(jnp.bfloat16).astype(np.float32)
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(jnp.asarray(mine / rough), exact)


def test_what_is_stored_in_bf16_passes_where_the_oracle_says_so_alone():
    x = np.random.default_rng(seeded(0)).standard_normal((32, 32)).astype(np.float32)
    short = x.astype(jnp.bfloat16).astype(np.float32)
    want, got = Rounded(x), jnp.asarray(short @ x)
    assert_within_rounding(got, stored(want, jnp.bfloat16) @ want)
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(got, want @ want)
