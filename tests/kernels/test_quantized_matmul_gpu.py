"""The kernel for weights in few bits on a Hopper GPU, against the dequantized product in fp64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantized_matmul
from pallas_kernels.quantized_matmul import QuantizedWeight, arranged
from pallas_kernels.quantized_matmul.config import ProductShape, QuantizedConfig, configs
from pallas_kernels.quantized_matmul.hopper import quantized_matmul_hopper
from pallas_kernels.quantized_matmul.hopper_dequantize import dequantized_hopper
from pallas_kernels.quantized_matmul.rounded_inputs import rounded_rows
from tests.kernels.test_quantized_matmul_hopper import FORMATS, exact_and_bound, weight_of

pytestmark = pytest.mark.gpu

CASES = {  # format, M, K, N, how the weight is made, dtype of x
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


def operands(case: str) -> tuple[jax.Array, QuantizedWeight]:
    name, rows, depth, columns, options, dtype = CASES[case]
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(rows, depth)), dtype)
    return x, weight_of(FORMATS[name], shape=(depth, columns), **options)


def is_rounded(got: jax.Array, exact: np.ndarray, bound: np.ndarray) -> bool:
    """Whether a 16-bit result is a sum within the bound, rounded once."""
    unit = float(jnp.finfo(got.dtype).eps) / 2
    error = np.abs(np.asarray(got.astype(jnp.float32), np.float64) - exact)
    return bool((error <= bound + unit * (np.abs(exact) + bound)).all())


@pytest.mark.parametrize("case", list(CASES))
def test_kernel_computes_the_product_with_what_the_weight_stands_for(case):
    x, weight = operands(case)
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
    x, weight = operands(case)
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
@pytest.mark.parametrize("name", ["e4m3, rounding", "int8, rounding"])
def test_rounded_inputs_are_multiplied_exactly(name, rows):
    """As the product of the rounded input with the weight: codes lose nothing in 16 bits."""
    weight = weight_of(FORMATS[name], shape=(1024, 512))
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
        (config.split, config.groups): config for config in configs(shape) if config.tiles <= 2
    }
    assert len(wanted) >= 8

    def product(config: QuantizedConfig) -> np.ndarray:
        call = functools.partial(
            quantized_matmul_hopper, out_dtype=jnp.dtype(jnp.float32), config=config
        )
        return np.asarray(jax.jit(call)(x, found))

    quads = (dataclasses.replace(config, quads=True) for config in wanted.values())
    for config in [*wanted.values(), *quads]:
        got = product(config)
        assert (np.abs(got - exact) <= bound).all(), config
        np.testing.assert_array_equal(got, product(config))


def test_rows_are_computed_alone():
    """What is beside a row in the batch changes no bit of it, nor does what is not a number."""
    x, weight = operands("strips and zeros")
    found = jax.jit(arranged)(weight)
    multiply = jax.jit(functools.partial(quantized_matmul, implementation="hopper"))
    whole = multiply(x, found)
    spoiled = multiply(x.at[3].set(jnp.nan), found)
    kept = np.arange(len(x)) != 3
    np.testing.assert_array_equal(np.asarray(whole)[kept], np.asarray(spoiled)[kept])
    assert np.isnan(np.asarray(spoiled)[3].astype(np.float32)).all()


def test_order_of_rows_is_followed():
    x, weight = operands("one row")
    order = jnp.asarray(np.random.default_rng(5).permutation(x.shape[1]), jnp.int32)
    weight = dataclasses.replace(weight, order=order)
    exact, bound = exact_and_bound(x, weight.dequantize(jnp.float32))
    got = quantized_matmul(x, arranged(weight), implementation="hopper", out_dtype=jnp.float32)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


def test_gradient_of_x_dequantizes_again():
    x, weight = operands("groups of 64")
    found = arranged(weight)
    call = functools.partial(quantized_matmul, implementation="hopper")
    _, pull = jax.vjp(lambda x: call(x, found), x)
    cotangent = jnp.ones((x.shape[0], weight.matrix_shape[1]), x.dtype)
    (got,) = pull(cotangent)
    assert is_rounded(got, *exact_and_bound(cotangent, weight.dequantize(x.dtype).T))
