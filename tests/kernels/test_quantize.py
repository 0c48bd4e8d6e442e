"""Quantization without a GPU: against float64, and what becomes of special values."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError, quantize, quantize_both_ways
from pallas_kernels.common import device
from pallas_kernels.common.scales import Scaling, dequantized, spread
from pallas_kernels.fp8.formula import LEAST
from tests.seeds import seeded

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def matrix(rows=200, columns=272, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seeded(0))
    size = np.outer(10.0 ** rng.uniform(-3, 3, rows), np.ones(columns))
    return (rng.normal(size=(rows, columns)) * size).astype(dtype)


def quantized(x, form, **options):
    """By one program, its results on the host."""
    return jax.device_get(jax.jit(functools.partial(quantize, scaling=form, **options))(x))


def exact_scale(x, form, dtype, power_of_two):
    """In float64, from the definition."""
    x = np.abs(x.astype(np.float64))
    R, C = x.shape
    J, I = -(-C // 128), -(-R // 128)  # noqa: E741
    cuts = {
        "1x128": lambda: np.stack([x[:, 128 * j : 128 * j + 128].max(axis=1) for j in range(J)]),
        "128x128": lambda: np.array([
            [x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].max() for i in range(I)]
            for j in range(J)
        ]),
    }  # fmt: skip
    scale = np.maximum(cuts[form](), LEAST) / LARGEST[dtype]
    return 2.0 ** np.ceil(np.log2(scale)) if power_of_two else scale


@pytest.mark.parametrize("form", list(Scaling))
@pytest.mark.parametrize(("dtype", "power_of_two"), [(E4M3, False), (E5M2, True)])
def test_scales_and_values(form, power_of_two, dtype):
    x = matrix()
    got = quantized(x, form, dtype=dtype, power_of_two=power_of_two)
    want = exact_scale(x, form, dtype, power_of_two)
    np.testing.assert_allclose(got.scale, want, rtol=0 if power_of_two else 2**-22)
    # Of a given scale the value is the nearest; the quotient is rounded once or twice in fp32.
    spread_to = jax.jit(spread, static_argnums=(0, 2, 3))
    quotient = x.astype(np.float64) / np.asarray(spread_to(form, got.scale, *x.shape), np.float64)
    slack = 0.0 if power_of_two else 2.0**-22
    low, high = (
        np.asarray((quotient * factor).astype(ml_dtypes.float8_e4m3fn if dtype is E4M3
                   else ml_dtypes.float8_e5m2), np.float64)
        for factor in (1 - slack, 1 + slack)
    )  # fmt: skip
    values = got.values.astype(np.float32)
    assert np.all((values == low) | (values == high))
    assert np.abs(values).max() == pytest.approx(LARGEST[dtype], rel=0.5 if power_of_two else 0)


@pytest.mark.parametrize(("dtype", "power_of_two"), [(E4M3, True), (E5M2, False)])
def test_special_values(dtype, power_of_two):
    """One block of 128 a row; each holds 1.0 too."""
    specials = [np.inf, -np.inf, np.nan, -0.0, 2.0**-133, 2.0**-20, 1.0]
    x = np.zeros((len(specials) + 1, 128), jnp.bfloat16)
    x[:-1, 0], x[:-1, 5] = 1.0, specials
    values, scale = quantized(x, "1x128", dtype=dtype, power_of_two=power_of_two)
    back = np.asarray(jax.jit(dequantized)(values, scale))
    assert np.all(np.isnan(back[:3, 5]))  # infinities and NaN are NaN
    assert not np.isnan(np.delete(back, 5, axis=1)).any()  # of their neighbours none
    np.testing.assert_allclose(back[:-1, 0], 1.0, rtol=1e-6)
    assert np.all(scale[:, :-1] == scale[0, 0])
    assert np.all(back[3:5, 5] == 0)
    assert back[5, 5] == (2.0**-20 if dtype is E5M2 else 0)
    # A block of zeros: a small scale, and zeros.
    assert np.all(back[-1] == 0)
    assert 0 < scale[0, -1] <= LEAST / 2**7
    assert np.all(np.isfinite(scale))


def test_powers_of_two_are_the_least_that_fit():
    """At the edge: 448 fits exactly, the next bf16 above it does not."""
    edge = np.float32(1.75 * 2.0**10)
    above = np.nextafter(edge, np.float32(np.inf))
    x = np.float32([[edge] * 128, [above] * 128])
    assert quantized(x, "1x128", power_of_two=True).scale.tolist() == [[4.0, 8.0]]


def test_both_ways_is_each_way():
    x = matrix(256, 128)
    one, other = jax.device_get(jax.jit(quantize_both_ways)(x))
    for got, want in zip(itertools.chain(one, other),
                         itertools.chain(quantized(x, "1x128"), quantized(x.T, "1x128")),
                         strict=True):  # fmt: skip
        assert got.dtype == want.dtype
        assert np.array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize(("form", "power_of_two"), [("1x128", True), ("128x128", False)])
def test_the_kernel_has_the_same_bits(form, power_of_two):
    """In the interpreter: two tiles of columns, infinities, NaN and zeros among them."""
    x = matrix(128, 256)
    x[3, 5], x[70, 200], x[5] = np.inf, np.nan, 0.0
    options = {"power_of_two": power_of_two}
    parameters = plgpu.InterpretGPUParams()
    with device.compiling_for(device.H200), plgpu.force_gpu_interpret_mode(parameters):
        got = quantized(x, form, implementation="hopper", **options)
    want = quantized(x, form, implementation="xla", **options)
    for mine, plain in zip(got, want, strict=True):
        assert mine.dtype == plain.dtype
        np.testing.assert_array_equal(mine.astype(np.float32), plain.astype(np.float32))


@pytest.mark.parametrize("form", ["1x128", "128x128"])
def test_kernels_lower_for_a_gpu(form):
    f = jax.jit(functools.partial(quantize, scaling=form, dtype=E5M2, implementation="hopper"))
    with device.compiling_for(device.H200):
        f.trace(jax.ShapeDtypeStruct((384, 640), jnp.bfloat16)).lower(lowering_platforms=("cuda",))


def test_the_kernel_says_what_it_cannot():
    for x, options, reason in [
        (matrix(72, 128), {"scaling": "1x128"}, "R=72 is not a multiple of 64"),
        (matrix(128, 200), {"scaling": "128x128"}, "C=200 is not a multiple of 128"),
        (matrix(64, 128, jnp.float32), {"scaling": "1x128"}, "the kernel reads bfloat16"),
        (matrix(128, 128), {"scaling": "128x128", "power_of_two": True}, "no powers of two"),
        (matrix(64, 128), {"scaling": "1x128", "num_devices": 2}, "spread over 2 devices"),
    ]:
        with (
            device.compiling_for(device.H200),
            pytest.raises(UnsupportedError, match=f"{reason}.*implementation='xla' can"),
        ):
            quantize(x, implementation="hopper", **options)


def test_refusals():
    x = matrix(8, 128)
    for arguments, options, message in [
        ((x[0], "1x128"), {}, "reshape it"),
        ((x, "column"), {}, "must be one of 1x128, 128x128"),
        ((x, "1x128"), {"dtype": jnp.float16}, "dtype=float16"),
        ((x, "1x128"), {"implementation": "triton"}, "choose auto"),
    ]:
        with pytest.raises(InputError, match=message):
            quantize(*arguments, **options)
    with pytest.raises(UnsupportedError, match="passes the cotangent through"):
        jax.grad(lambda x: quantize(x, "1x128").scale.sum())(x.astype(np.float32))
