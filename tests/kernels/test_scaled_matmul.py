"""Scaled matmuls without a GPU: every form of scales against float64, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import InputError, UnsupportedError, quantize, scaled_matmul
from pallas_kernels.common.scales import Scaling, spread
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PAIRS = [("1x128", "128x128"), ("128x128", "1x128"), ("1x128", "1x128"), ("128x128", "128x128")]
quantized = jax.jit(quantize, static_argnames=("scaling", "dtype"))
multiplied = jax.jit(scaled_matmul, static_argnames="out_dtype")
DTYPES = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]


def operands(M, N, K, forms=("1x128", "128x128"), dtypes=(E4M3, E4M3)):
    """a, b, a_scale, b_scale: of rows and columns whose sizes differ by powers of ten."""
    rng = np.random.default_rng(seeded(0))

    def operand(rows, form, dtype):
        size = np.outer(10.0 ** rng.uniform(-2, 2, rows), 10.0 ** rng.uniform(-1, 1, K))
        x = (rng.normal(size=(rows, K)) * size).astype(np.float32)
        return jax.device_get(quantized(x, form, dtype=dtype))

    a, b = (operand(*each) for each in zip((M, N), forms, dtypes, strict=True))
    return a.values, b.values, a.scale, b.scale


def exact(a, b, a_scale, b_scale):
    """By blocks of 128 as the op defines it, in float64; each scale enters as a rounding."""
    sides = []
    for x, scale in ((a, a_scale), (b, b_scale)):
        form = next(f for f in Scaling if f.shape(*x.shape) == scale.shape)
        spread_to = jax.jit(spread, static_argnums=(0, 2, 3))
        each = np.asarray(spread_to(form, scale, *x.shape), np.float64)
        sides.append(Rounded(x.astype(np.float64)) * each)
    return np.einsum("mk,nk->mn", *sides)


@pytest.mark.parametrize("forms", PAIRS, ids="-".join)
def test_every_form_of_scales(forms):
    arrays = operands(24, 136, 272, forms)
    assert_within_rounding(multiplied(*arrays, out_dtype=jnp.float32), exact(*arrays))


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(d.__name__ for d in pair))
def test_every_pair_of_formats(dtypes):
    arrays = operands(8, 16, 256, dtypes=dtypes)
    assert_within_rounding(multiplied(*arrays), exact(*arrays))


@pytest.mark.parametrize("fault", ["scale of the next block", "a lost block", "rounded sums"])
def test_faults_are_caught(fault):
    a, b, a_scale, b_scale = operands(24, 136, 384)
    oracle = exact(a, b, a_scale, b_scale)
    wrong = (a, b, a_scale, b_scale)
    if fault == "scale of the next block":
        wrong = (a, b, np.roll(a_scale, 1, axis=0), b_scale)
    elif fault == "a lost block":
        lost = np.concatenate([a[:, :128], np.zeros_like(a[:, 128:256]), a[:, 256:]], axis=1)
        wrong = (lost, b, a_scale, b_scale)
    got = np.asarray(multiplied(*wrong, out_dtype=jnp.float32))
    if fault == "rounded sums":
        got = got.astype(jnp.bfloat16).astype(np.float32)
    with pytest.raises(AssertionError, match="spread"):
        assert_within_rounding(got, oracle)


def test_refusals_say_what_to_do():
    a, b, a_scale, b_scale = operands(8, 128, 256)
    cases = [
        ((a.astype(np.float32), b, a_scale, b_scale), {}, "make it by quantize"),
        ((a, b, a_scale.T, b_scale), {}, r"a_scale is float32\[8, 2\].*\[2, 8\] \(1x128\)"),
        ((a, b[:, :128], a_scale, b_scale[:1]), {}, "Transpose b"),
        ((a, b, a_scale, b_scale[0]), {}, r"float32 of one of these shapes"),
        ((a, b, a_scale, b_scale), {"out_dtype": jnp.int32}, "out_dtype=int32"),
        ((a, b, a_scale, b_scale), {"implementation": "cutlass"}, "choose auto"),
    ]
    for arrays, options, message in cases:
        with pytest.raises(InputError, match=message):
            scaled_matmul(*arrays, **options)


def test_it_has_no_gradient():
    a, b, a_scale, b_scale = operands(8, 128, 128)
    with pytest.raises(UnsupportedError, match="a recipe quantizes the cotangent"):
        jax.grad(lambda s: scaled_matmul(a, b, s, b_scale, out_dtype=jnp.float32).sum())(a_scale)
