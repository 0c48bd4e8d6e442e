"""Weights in few bits against arrays computed element by element in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import InputError, UnsupportedError, quantized_matmul
from pallas_kernels.common import device
from pallas_kernels.quantized_weight import (
    Activations,
    Arrangement,
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    arranged,
    concatenated_columns,
    repeated_outputs,
    round_weight,
)
from pallas_kernels.quantized_weight.weight import (
    in_rows,
    packed_pairs,
    unpacked_pairs,
    weight_codes,
)
from tests.kernels.few_rows_cases import FORMATS as ARRANGED
from tests.kernels.few_rows_cases import SHAPE, exact_and_bound, weight_of

K, N = 24, 10
ROWS, COLUMNS = SHAPE
RNG = np.random.default_rng(0)
INT4 = WeightFormat(code=WeightCode.INT4, group_rows=8)
FORMATS = [
    INT4,
    WeightFormat(code=WeightCode.INT8),
    WeightFormat(code=WeightCode.E4M3, group_columns=0),
    WeightFormat(code=WeightCode.E4M3, group_rows=10, group_columns=4),  # partial at both edges
    WeightFormat(code=WeightCode.NF4, group_rows=6),
]


@jax.jit
def dequantized(weight):
    return weight.dequantize(jnp.float32)


def stored(form, *, has_zeros=False, order=None):
    """A random weight in this format, and the number that each element stands for."""
    grid = form.scales_shape(K, N)
    scales = RNG.uniform(0.5, 2, grid).astype(np.float32)
    zeros = RNG.integers(0, 17, (grid[0], N)).astype(np.int8) if has_zeros else None
    match form.code:
        case WeightCode.INT4:
            codes = RNG.integers(0, 16, (K, N)).astype(np.uint8)
            number = codes.astype(np.float64)
        case WeightCode.NF4:
            codes = RNG.integers(0, 16, (K, N)).astype(np.uint8)
            number = np.linspace(-1, 1, 16)[codes]
        case WeightCode.INT8:
            codes = RNG.integers(-127, 128, (K, N)).astype(np.int8)
            number = codes.astype(np.float64)
        case WeightCode.E4M3:
            codes = RNG.normal(size=(K, N)).astype(ml_dtypes.float8_e4m3fn)
            number = codes.astype(np.float64)
    value = np.zeros((K, N))
    for k, n in np.ndindex(K, N):
        g, c = k // (form.group_rows or K), n // (form.group_columns or N)
        zero = 8.0 * (form.code is WeightCode.INT4) if zeros is None else float(zeros[g, n])
        value[k if order is None else order[k], n] = (number[k, n] - zero) * scales[g, c]
    data = codes
    if form.code.bits == 4:
        half = form.group_rows // 2
        data = np.zeros((K // 2, N), np.uint8)
        for k, n in np.ndindex(K, N):
            group, r = divmod(k, 2 * half)
            data[group * half + r % half, n] |= codes[k, n] << (4 if r >= half else 0)
    parts = {"data": data, "scales": scales, "zeros": zeros, "order": order}
    parts = {name: None if x is None else jnp.asarray(x) for name, x in parts.items()}
    return QuantizedWeight(**parts, format=form, inputs=(K,), outputs=(5, 2)), value


def but_first_slow(cases):
    return [cases[0], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]


@pytest.mark.parametrize("form", but_first_slow(FORMATS[:4]), ids=lambda form: form.name)
def test_elements_are_what_the_format_says(form):
    order = RNG.permutation(K).astype(np.int32)
    cases = [{"order": order}] + [{"has_zeros": True}] * (form.code is WeightCode.INT4)
    for options in cases:
        weight, value = stored(form, **options)
        got = np.asarray(dequantized(weight.check()))
        assert got.shape == weight.shape == (K, 5, 2)
        # A product of two float32 numbers, rounded once.
        np.testing.assert_array_equal(got.reshape(K, N), value.astype(np.float32))
        x = jnp.asarray(RNG.normal(size=(3, K)), jnp.float32)
        bound = K * 2.0**-23 * (np.abs(x) @ np.abs(value))
        for most_bytes in (None, K * 4 * 4):
            call = functools.partial(quantized_matmul, most_bytes=most_bytes)
            product, pull = jax.vjp(jax.jit(call), x, weight)
            assert (np.abs(product - np.asarray(x, np.float64) @ value) <= bound).all()
        dx, _ = jax.jit(pull)(jnp.ones((3, N)))
        np.testing.assert_allclose(dx[0], value.sum(1), rtol=1e-5, atol=1e-5)


def test_halves_of_a_group_share_bytes():
    codes = jnp.arange(12, dtype=jnp.uint8)[:, None] % 16
    packed = packed_pairs(codes, 4)
    assert packed[:, 0].tolist() == [0 | 2 << 4, 1 | 3 << 4, 4 | 6 << 4, 5 | 7 << 4, 168, 185]
    assert unpacked_pairs(packed, 4).tolist() == codes.tolist()


@pytest.mark.parametrize("form", but_first_slow(FORMATS), ids=lambda form: form.name)
def test_rounding_is_to_the_nearest(form):
    """No element is off by more than half the step between two codes of its group."""
    w = RNG.normal(size=(K, N)).astype(np.float32)
    weight = jax.jit(lambda w: round_weight(w, form))(w)
    got, scales = np.asarray(dequantized(weight)), np.asarray(weight.scales)
    assert scales.shape == form.scales_shape(K, N)
    for k, n in np.ndindex(K, N):
        scale = scales[k // (form.group_rows or K), n // (form.group_columns or N)]
        size = abs(float(w[k, n])) / scale
        step = {"int4": 1.0, "int8": 1.0, "nf4": 0.31}.get(form.code.value)
        if step is None:  # e4m3: three bits behind the first
            step = 2.0 ** (max(np.floor(np.log2(size)), -6) - 3)
        assert abs(got[k, n] - w[k, n]) <= (0.5 * step + 1e-5) * scale


def test_ranges_with_zero_points_reach_both_ends():
    w = jnp.asarray(RNG.uniform(1.0, 3.0, size=(K, N)), jnp.float32)
    largest = jax.jit(
        lambda z: jnp.abs(round_weight(w, INT4, has_zeros=z).dequantize(jnp.float32) - w).max(),
        static_argnums=0,
    )
    assert largest(True) <= 0.5 * 3 / 15 * 1.001 < largest(False)


@pytest.mark.parametrize(
    ("activations", "has_zeros"),
    [(Activations.INT8, False), (Activations.INT8, True), (Activations.E4M3, False)],
)
def test_activations_are_rounded_row_by_row(activations, has_zeros):
    form = WeightFormat(code=WeightCode(activations.value), activations=activations)
    weight, value = stored(form, has_zeros=has_zeros)
    x = RNG.normal(size=(3, K)) * np.array([[1.0], [1e3], [1e-3]])
    top = 127 if activations is Activations.INT8 else 448
    scale = np.abs(x).max(1, keepdims=True).astype(np.float32) / np.float32(top)
    scaled = x.astype(np.float32) / scale
    if activations is Activations.INT8:
        rounded = np.round(scaled).astype(np.float64)
    else:
        rounded = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    got = jax.jit(quantized_matmul)(jnp.asarray(x, jnp.float32), weight)
    bound = K * 2.0**-23 * (np.abs(rounded * scale) @ np.abs(value))
    assert (np.abs(got - (rounded * scale) @ value) <= bound).all()
    with pytest.raises(UnsupportedError, match="has no gradient"):
        jax.grad(lambda x: quantized_matmul(x, weight).sum())(jnp.ones((1, K)))


def test_columns_are_repeated_and_joined_without_dequantizing():
    weights = [stored(FORMATS[3])[0] for _ in range(2)]
    whole = [np.asarray(dequantized(weight)) for weight in weights]
    joined = jax.jit(lambda *weights: concatenated_columns(weights, axis=-2))(*weights)
    np.testing.assert_array_equal(dequantized(joined), np.concatenate(whole, axis=1))
    twice = jax.jit(lambda weight: repeated_outputs(weight, 2, axis=-2))(weights[0])
    np.testing.assert_array_equal(dequantized(twice), np.repeat(whole[0], 2, axis=1))
    with pytest.raises(InputError, match="keep them apart"):
        concatenated_columns([weights[0], stored(INT4)[0]], axis=-1)


def test_what_disagrees_is_refused():
    weight, _ = stored(INT4)
    x = jnp.ones((2, K))
    for form in ({"group_rows": 7}, {"group_rows": 0}):
        with pytest.raises(InputError, match="even number of rows"):
            dataclasses.replace(INT4, **form)
    with pytest.raises(InputError, match="both sides of an 8-bit product"):
        WeightFormat(code=WeightCode.INT4, group_rows=8, activations=Activations.INT8)
    with pytest.raises(InputError, match="scales of a weight"):
        dataclasses.replace(weight, scales=weight.scales[:1]).check()
    with pytest.raises(InputError, match="do not divide into groups"):
        round_weight(jnp.ones((20, 2)), INT4)
    with pytest.raises(InputError, match="as many columns"):
        quantized_matmul(x[:, :8], weight)
    with pytest.raises(InputError, match="implementation='fast'"):
        quantized_matmul(x, weight, implementation="fast")


def places_of(code: WeightCode, k: int, n: int) -> tuple[int, int, int, int]:
    """Block of rows, block of columns, word and first bit of an element, by the documentation."""
    (b, k), (c, n) = divmod(k, 32), divmod(n, 16)
    step, k = divmod(k, 16)
    h, k = divmod(k, 8)
    t, e = divmod(k, 2)
    r, g = divmod(n, 8)
    lane = 4 * g + t
    if code.bits == 4:
        return b, c, 2 * lane + step, 4 * (2 * h + r) + 16 * e
    byte = 2 * r + e if code is WeightCode.INT8 else 2 * e + 1 - r
    return b, c, 4 * lane + 2 * step + h, 8 * byte


@pytest.mark.parametrize("name", ["int4", "int8", "e4m3"])
def test_codes_lie_where_threads_hold_them(name):
    weight = weight_of(ARRANGED[name])
    codes = np.asarray(jax.jit(weight_codes)(weight)).view(np.uint8)
    found = jax.jit(arranged)(weight)
    words = np.asarray(found.data).view(np.uint32)
    assert found.check().arrangement is Arrangement.FRAGMENTS
    mask = 2**weight.format.code.bits - 1
    for k, n in zip(range(ROWS), np.random.default_rng(1).integers(0, COLUMNS, ROWS), strict=True):
        b, c, word, bit = places_of(weight.format.code, k, int(n))
        assert words[b, c, word] >> bit & mask == codes[k, n], (k, n)
    back = jax.jit(in_rows)(found)
    np.testing.assert_array_equal(
        np.asarray(back.data).view(np.uint8), np.asarray(weight.data).view(np.uint8)
    )


@jax.jit
def both_ways(weight, x):
    """What a weight stands for in rows and arranged, and the arranged one's product, cut in two."""
    found = arranged(weight)
    product = quantized_matmul(x, found, most_bytes=4 * ROWS * COLUMNS // 2)
    return weight.dequantize(jnp.float32), found.dequantize(jnp.float32), product


def test_arranged_weights_stand_for_the_same():
    x = np.random.default_rng(2).normal(size=(3, ROWS)).astype(np.float32)
    for name, has_zeros in (("int4 of 64", True), ("blocks", False)):
        weight = weight_of(ARRANGED[name], has_zeros=has_zeros)
        want, got, product = jax.device_get(both_ways(weight, x))
        np.testing.assert_array_equal(got, want)
        exact, bound = exact_and_bound(x, want)
        assert (np.abs(np.asarray(product, np.float64) - exact) <= bound).all()
        assert not (np.abs(product - x @ np.roll(want, 1, axis=0)) <= bound).all()


@pytest.mark.parametrize("activations", list(Activations))
def test_weights_of_rounded_inputs_stand_for_the_same_arranged(activations):
    form = WeightFormat(code=WeightCode(activations.value), activations=activations)
    weight = weight_of(form)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, ROWS)), jnp.float32)

    @jax.jit
    def products(weight, x):
        found = arranged(weight)
        return found, quantized_matmul(x, weight), quantized_matmul(x, found)

    found, want, got = products(weight, x)
    is_int8 = activations is Activations.INT8
    kind = Arrangement.FRAGMENTS if is_int8 else Arrangement.TRANSPOSED
    assert found.check().arrangement is kind
    np.testing.assert_allclose(got, want, rtol=0 if is_int8 else 1e-5, atol=0 if is_int8 else 1e-4)
    assert jax.eval_shape(in_rows, found) == jax.eval_shape(lambda x: x, weight)


def test_layers_are_arranged_together():
    layers = weight_of(ARRANGED["int8"], shape=(2 * ROWS, COLUMNS)).data.reshape(2, ROWS, COLUMNS)
    one = weight_of(ARRANGED["int8"])
    stacked = dataclasses.replace(one, data=layers, scales=jnp.stack([one.scales] * 2))
    found = jax.jit(arranged)(stacked)
    assert found.check().leading == (2,)
    assert found.shape == (2, ROWS, COLUMNS)
    np.testing.assert_array_equal(jax.jit(weight_codes)(found), layers)


def shapes_of(form, shape=SHAPE):
    """Of a weight's parts: what is refused is refused before anything is computed."""
    whole = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(functools.partial(round_weight, form=form), whole)


def x_of(count: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((count, SHAPE[0]), dtype)


def test_what_no_kernel_takes_is_refused():
    weight = shapes_of(ARRANGED["int8"])
    fitting = jax.eval_shape(arranged, weight)
    named = functools.partial(quantized_matmul, implementation="hopper")
    with pytest.raises(UnsupportedError, match="xla can"):
        jax.eval_shape(named, x_of(2), fitting)
    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="lies in rows; give it arranged"):
            jax.eval_shape(named, x_of(2), weight)
        with pytest.raises(UnsupportedError, match="float32"):
            jax.eval_shape(named, x_of(2, jnp.float32), fitting)
    groups = WeightFormat(code=WeightCode.INT8, group_rows=64, activations=Activations.INT8)
    for form, shape, why in (
        (WeightFormat(code=WeightCode.NF4, group_rows=64), SHAPE, "looked up"),
        (WeightFormat(code=WeightCode.INT4, group_rows=32), SHAPE, "groups of 32"),
        (ARRANGED["int8"], (SHAPE[0] + 64, SHAPE[1]), "320 rows"),
        (ARRANGED["int8"], (SHAPE[0], 100), "100 columns"),
        (groups, SHAPE, "scales along K"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            jax.eval_shape(arranged, shapes_of(form, shape))
