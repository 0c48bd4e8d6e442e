"""Products of few rows on a Hopper GPU, against the formula in fp64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows_matmul, quantized_matmul
from pallas_kernels.few_rows_matmul.config import (
    ProductShape,
    QuantizedConfig,
    SkinnyConfig,
    fused_configs,
    quantized_configs,
)
from pallas_kernels.few_rows_matmul.hopper import fused_hopper, product_hopper
from pallas_kernels.few_rows_matmul.reference import FewRowsCall
from pallas_kernels.few_rows_matmul.rounded import rounded_rows
from pallas_kernels.quantized_weight import QuantizedWeight, arranged
from pallas_kernels.quantized_weight.hopper_dequantize import dequantized_hopper
from tests.kernels.few_rows_cases import (
    FORMATS,
    OPTIONS,
    exact,
    exact_and_bound,
    operands,
    weight_of,
)
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu

CASES = [
    (case, shape, jnp.bfloat16)
    for case in OPTIONS
    if case not in ("plain", "gated")
    for shape in ((1, 1024, 512), (8, 2048, 256))
] + [
    ("norm of fp32, gated", (3, 512, 1024), jnp.float16),
    # Requests of two stages, as many as here, lost a tile (``hopper.ring``).
    ("residual", (1, 14_336, 256), jnp.bfloat16),
]
QUANTIZED = [
    (case, rows, form)
    for rows, form in ((1, "int4"), (7, "e4m3"))
    for case in OPTIONS
    if "swiglu" not in OPTIONS[case] and case != "plain"
] + [("norm", 4, "int8"), ("residual", 1, "e4m3"), ("hidden values, residual", 1, "int8")]
TILINGS = [
    QuantizedConfig(tiles=1, split=1, groups=4, stages=12),
    QuantizedConfig(tiles=1, split=8, groups=2, stages=2),
    QuantizedConfig(tiles=4, split=2, groups=1, stages=5),
]


def checked(f, x, w, given) -> None:
    """Within rounding of the formula, twice the same, and not without a part of K or an option."""
    true = exact(x, w, given)
    got = f(x, w, given)
    assert_within_rounding(got, true)
    np.testing.assert_array_equal(np.asarray(f(x, w, given)), np.asarray(got))
    zeroed = x.copy()
    zeroed[:, -64:] = 0
    for wrong in ((zeroed, w, given), (np.roll(x, 8, axis=1), w, given)):
        with pytest.raises(AssertionError):
            assert_within_rounding(f(*wrong), true)


@pytest.mark.parametrize(("case", "shape", "dtype"), CASES, ids=str)
def test_fused_kernel_computes_the_formula(case, shape, dtype):
    x, w, given = operands(*shape, OPTIONS[case], dtype)
    flags = {name: given[name] for name in given if name.startswith("swiglu")}
    arrays = {name: given[name] for name in given if name not in flags}
    every = fused_configs(FewRowsCall(x=x, weight=w, **given).shape)
    # Most and fewest parts of K, most and fewest columns.
    for config in dict.fromkeys((every[0], every[len(every) // 2], every[-1])):

        def multiply(x, w, arrays, config=config):
            return fused_hopper(FewRowsCall(x=x, weight=w, **arrays, **flags), config)

        run = jax.jit(multiply)
        checked(lambda x, w, _, run=run: run(x, w, arrays), x, w, given)


@pytest.mark.parametrize(("case", "rows", "form"), QUANTIZED)
def test_fused_kernel_of_quantized_weights(case, rows, form):
    depth, columns = 2048, 512
    x, _, given = operands(rows, depth, columns, OPTIONS[case])
    weight = weight_of(FORMATS[form], shape=(depth, columns))
    found = jax.jit(arranged)(weight)
    flags = {name: given[name] for name in given if name.startswith("swiglu")}
    arrays = {name: given[name] for name in given if name not in flags}
    run = jax.jit(functools.partial(few_rows_matmul, implementation="fused", **flags))
    checked(lambda x, w, _: run(x, found, **arrays), x, weight, given)
    for tiling in TILINGS:

        def multiply(x, weight, arrays, tiling=tiling):
            return fused_hopper(FewRowsCall(x=x, weight=weight, **arrays, **flags), tiling)

        named = jax.jit(multiply)
        checked(lambda x, w, _, named=named: named(x, found, arrays), x, weight, given)


SKINNY = [
    ((1, 4096, 6144), False, SkinnyConfig(depth=128)),
    ((64, 2048, 2048), False, SkinnyConfig(depth=128, splits=4)),
    ((61, 1024, 512), True, SkinnyConfig(tile_n=128)),
    ((256, 2048, 4096), False, SkinnyConfig(splits=2, transposed=True)),
    ((240, 1024, 512), True, SkinnyConfig(tile_n=128, transposed=True)),
]


@pytest.mark.parametrize(("shape", "swiglu", "config"), SKINNY, ids=str)
def test_skinny_kernel_computes_the_formula(shape, swiglu, config):
    x, w, given = operands(*shape, {"swiglu": swiglu})
    f = functools.partial(
        product_hopper, config=config, out_dtype=jnp.dtype(jnp.bfloat16), swiglu=swiglu
    )
    run = jax.jit(f)
    checked(lambda x, w, _: run(x, w), x, w, given)


PRODUCTS = {  # format, M, K, N, how the weight is made, dtype of x
    "one row": ("int4", 1, 1024, 896, {"scale_dtype": jnp.bfloat16}, jnp.bfloat16),
    "strips and zeros": ("int4", 11, 2048, 256, {"has_zeros": True}, jnp.float16),
    "groups of 64": ("int4 of 64", 3, 1024, 512, {"has_zeros": True}, jnp.bfloat16),
    "staged x": ("int4 of 64", 61, 1024, 256, {"scale_dtype": jnp.float16}, jnp.bfloat16),
    "rows in turns": ("int8", 130, 512, 192, {}, jnp.bfloat16),
    "int8, fp16": ("int8", 5, 4096, 128, {"scale_dtype": jnp.bfloat16}, jnp.float16),
    "fp8": ("e4m3", 2, 2048, 320, {}, jnp.bfloat16),
    "fp8, fp16": ("e4m3", 20, 2048, 320, {}, jnp.float16),
    "blocks": ("blocks", 9, 1024, 256, {}, jnp.bfloat16),
}


def product_operands(case: str) -> tuple[jax.Array, QuantizedWeight]:
    name, rows, depth, columns, options, dtype = PRODUCTS[case]
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(rows, depth)), dtype)
    return x, weight_of(FORMATS[name], shape=(depth, columns), **options)


def is_rounded(got: jax.Array, exact: np.ndarray, bound: np.ndarray) -> bool:
    """Whether a 16-bit result is a sum within the bound, rounded once."""
    unit = float(jnp.finfo(got.dtype).eps) / 2
    error = np.abs(np.asarray(got.astype(jnp.float32), np.float64) - exact)
    return bool((error <= bound + unit * (np.abs(exact) + bound)).all())


@pytest.mark.parametrize("case", list(PRODUCTS))
def test_kernel_multiplies_with_what_a_quantized_weight_stands_for(case):
    x, weight = product_operands(case)
    exact, bound = exact_and_bound(x, weight.dequantize(jnp.float32))
    found = jax.jit(arranged)(weight)
    multiply = jax.jit(functools.partial(quantized_matmul, implementation="hopper"))
    wide = jax.jit(
        functools.partial(quantized_matmul, implementation="hopper", out_dtype=jnp.float32)
    )
    got = np.asarray(wide(x, found), np.float64)
    assert (np.abs(got - exact) <= bound).all()
    assert is_rounded(multiply(x, found), exact, bound)
    # No rounding: a group left out, scales of the neighbor, codes of the next block.
    wrong = [
        (x.at[:, -64:].set(0), found),
        (x, dataclasses.replace(found, data=jnp.roll(found.data, 1, axis=0))),
    ]
    if found.scales.size > 1:
        scales = jnp.roll(found.scales, 1, axis=-1)
        if not bool((scales == found.scales).all()):
            wrong.append((x, dataclasses.replace(found, scales=scales)))
    for fault in wrong:
        assert not (np.abs(np.asarray(wide(*fault), np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("case", ["strips and zeros", "groups of 64", "int8, fp16", "blocks"])
def test_many_rows_have_the_weight_dequantized_to_the_bit(case):
    x, weight = product_operands(case)
    found = jax.jit(arranged)(weight)
    got = jax.jit(functools.partial(dequantized_hopper, dtype=x.dtype))(found)
    want = jax.jit(lambda w: w.dequantize(x.dtype))(weight)
    np.testing.assert_array_equal(np.asarray(got).T, np.asarray(want))
    # The same of a product whose weight is dequantized some columns at a time.
    many = jnp.tile(x, (300, 1))[:300]
    columns = functools.partial(
        quantized_matmul, implementation="hopper", most_bytes=2 * want.size // 2
    )
    product = jax.jit(columns)(many, found)
    exact, bound = exact_and_bound(many, want)
    assert is_rounded(product, exact, bound)
    assert not is_rounded(jnp.roll(product, 1, axis=1), exact, bound)


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_inputs_rounded_to_int8_are_multiplied_exactly(rows):
    """As the product of the rounded input with the weight: codes lose nothing in 16 bits."""
    weight = weight_of(FORMATS["int8, rounding"], shape=(1024, 512))
    x = jnp.asarray(np.random.default_rng(6).normal(size=(rows, 1024)), jnp.bfloat16)
    values, scale = jax.jit(rounded_rows, static_argnums=1)(x, weight.format.activations)
    rounded = np.asarray(values, np.float64) * np.asarray(scale, np.float64)
    w = np.asarray(weight.dequantize(jnp.float32), np.float64)
    # Sums as elsewhere; both scales round a result, and dequantizing an element, once each.
    _, sums = exact_and_bound(rounded, w)
    bound = sums + 4 * 2.0**-24 * (np.abs(rounded) @ np.abs(w))
    call = functools.partial(quantized_matmul, implementation="hopper", out_dtype=jnp.float32)
    got = np.asarray(jax.jit(call)(x, jax.jit(arranged)(weight)), np.float64)
    assert (np.abs(got - rounded @ w) <= bound).all()
    unrounded = np.asarray(x, np.float64) @ w
    assert not (np.abs(got - unrounded) <= bound).all()


@pytest.mark.parametrize("rows", [1, pytest.param(16, marks=pytest.mark.slow), 40])
def test_every_way_to_share_the_work_gives_the_same_sums_each_time(rows):
    """Blocks of a cluster, warpgroups in turns: an order of sums, and the same at each call."""
    depth, columns = 2048, 512
    x = jnp.asarray(np.random.default_rng(4).normal(size=(rows, depth)), jnp.bfloat16)
    weight = weight_of(FORMATS["int4"], shape=(depth, columns))
    exact, bound = exact_and_bound(x, weight.dequantize(jnp.float32))
    found = jax.jit(arranged)(weight)
    shape = ProductShape.of(rows, found)
    wanted = {
        (config.split, config.groups): config
        for config in quantized_configs(shape)
        if config.tiles <= 2
    }
    assert len(wanted) >= 8

    def product(config: QuantizedConfig) -> np.ndarray:
        call = functools.partial(product_hopper, out_dtype=jnp.dtype(jnp.float32), config=config)
        return np.asarray(jax.jit(call)(x, found))

    for config in wanted.values():
        got = product(config)
        assert (np.abs(got - exact) <= bound).all(), config
        np.testing.assert_array_equal(got, product(config))


def test_rows_are_computed_alone():
    """What is beside a row in the batch changes no bit of it, nor does what is not a number."""
    x, weight = product_operands("strips and zeros")
    found = jax.jit(arranged)(weight)
    multiply = jax.jit(functools.partial(quantized_matmul, implementation="hopper"))
    whole = multiply(x, found)
    spoiled = multiply(x.at[3].set(jnp.nan), found)
    kept = np.arange(len(x)) != 3
    np.testing.assert_array_equal(np.asarray(whole)[kept], np.asarray(spoiled)[kept])
    assert np.isnan(np.asarray(spoiled)[3].astype(np.float32)).all()


def test_order_of_rows_is_followed():
    x, weight = product_operands("one row")
    order = jnp.asarray(np.random.default_rng(5).permutation(x.shape[1]), jnp.int32)
    weight = dataclasses.replace(weight, order=order)
    exact, bound = exact_and_bound(x, weight.dequantize(jnp.float32))
    got = quantized_matmul(x, arranged(weight), implementation="hopper", out_dtype=jnp.float32)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


def test_gradient_of_x_dequantizes_again():
    x, weight = product_operands("groups of 64")
    found = arranged(weight)
    call = functools.partial(quantized_matmul, implementation="hopper")
    _, pull = jax.vjp(lambda x: call(x, found), x)
    cotangent = jnp.ones((x.shape[0], weight.matrix_shape[1]), x.dtype)
    (got,) = pull(cotangent)
    assert is_rounded(got, *exact_and_bound(cotangent, weight.dequantize(x.dtype).T))
