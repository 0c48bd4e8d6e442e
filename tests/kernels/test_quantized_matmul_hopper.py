"""The kernel for weights in few bits without a GPU: order of codes, lowering, tiles, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError, quantized_matmul
from pallas_kernels.common import device
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.quantized_matmul import (
    Activations,
    Arrangement,
    WeightCode,
    WeightFormat,
    arranged,
    round_weight,
)
from pallas_kernels.quantized_matmul.choice import measured_config
from pallas_kernels.quantized_matmul.codes import in_rows, weight_codes
from pallas_kernels.quantized_matmul.config import (
    ProductShape,
    QuantizedConfig,
    config_for,
    configs,
)
from pallas_kernels.quantized_matmul.hopper import quantized_matmul_hopper

FORMATS = {
    "int4": WeightFormat(code=WeightCode.INT4, group_rows=128),
    "int4 of 64": WeightFormat(code=WeightCode.INT4, group_rows=64),
    "int8": WeightFormat(code=WeightCode.INT8),
    "e4m3": WeightFormat(code=WeightCode.E4M3, group_columns=0),
    "blocks": WeightFormat(code=WeightCode.E4M3, group_rows=128, group_columns=128),
    "int8, rounding": WeightFormat(code=WeightCode.INT8, activations=Activations.INT8),
    "e4m3, rounding": WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3),
}
ROUNDING_GROUPS = WeightFormat(code=WeightCode.INT8, group_rows=64, activations=Activations.INT8)
K, N = 256, 128
rounded = jax.jit(round_weight, static_argnames=("form", "has_zeros", "scale_dtype"))


def weight_of(form, *, has_zeros=False, shape=(K, N), scale_dtype=jnp.float32):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return rounded(x, form, has_zeros=has_zeros, scale_dtype=jnp.dtype(scale_dtype))


def exact_and_bound(x: jax.Array, w: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far sums in fp32 may be from it.

    Products of 16-bit numbers are exact in fp32, others are rounded there. Of K of them, as many
    additions and as many truncations of a tensor core each may be off by half a unit in the last
    place, or a whole one, of a sum that is at most that of all terms' sizes.
    """
    x64, w64 = (np.asarray(each, np.float64) for each in (x, w))
    return x64 @ w64, len(w64) * 2.0**-23 * (np.abs(x64) @ np.abs(w64))


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
    weight = weight_of(FORMATS[name])
    codes = np.asarray(jax.jit(weight_codes)(weight)).view(np.uint8)
    found = jax.jit(arranged)(weight)
    words = np.asarray(found.data).view(np.uint32)
    assert found.check().arrangement is Arrangement.FRAGMENTS
    mask = 2**weight.format.code.bits - 1
    for k, n in zip(range(K), np.random.default_rng(1).integers(0, N, K), strict=True):
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
    product = quantized_matmul(x, found, most_bytes=4 * K * N // 2)
    return weight.dequantize(jnp.float32), found.dequantize(jnp.float32), product


def test_arranged_weights_stand_for_the_same():
    x = np.random.default_rng(2).normal(size=(3, K)).astype(np.float32)
    for name, has_zeros in (("int4 of 64", True), ("blocks", False)):
        weight = weight_of(FORMATS[name], has_zeros=has_zeros)
        want, got, product = jax.device_get(both_ways(weight, x))
        np.testing.assert_array_equal(got, want)
        exact, bound = exact_and_bound(x, want)
        assert (np.abs(np.asarray(product, np.float64) - exact) <= bound).all()
        assert not (np.abs(product - x @ np.roll(want, 1, axis=0)) <= bound).all()


@pytest.mark.parametrize("activations", list(Activations))
def test_weights_of_rounded_inputs_are_arranged_alike(activations):
    form = WeightFormat(code=WeightCode(activations.value), activations=activations)
    weight = weight_of(form)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, K)), jnp.float32)

    @jax.jit
    def products(weight, x):
        found = arranged(weight)
        return found, quantized_matmul(x, weight), quantized_matmul(x, found)

    found, want, got = products(weight, x)
    assert found.check().arrangement is Arrangement.FRAGMENTS
    np.testing.assert_array_equal(got, want)
    assert jax.eval_shape(in_rows, found) == jax.eval_shape(lambda x: x, weight)


def test_layers_are_arranged_together():
    layers = weight_of(FORMATS["int8"], shape=(2 * K, N)).data.reshape(2, K, N)
    one = weight_of(FORMATS["int8"])
    stacked = dataclasses.replace(one, data=layers, scales=jnp.stack([one.scales] * 2))
    found = jax.jit(arranged)(stacked)
    assert found.check().leading == (2,)
    assert found.shape == (2, K, N)
    np.testing.assert_array_equal(jax.jit(weight_codes)(found), layers)


CALLS = {
    "one row": ("int4", 1, 4096, 14_336, {}, jnp.bfloat16),
    "split": ("int4", 16, 14_336, 4096, {"scale_dtype": jnp.bfloat16}, jnp.bfloat16),
    "staged x": ("int4 of 64", 61, 1024, 512, {"has_zeros": True}, jnp.float16),
    "rows in turns": ("int8", 130, 4096, 4096, {}, jnp.bfloat16),
    "fp8": ("e4m3", 5, 4096, 6144, {"scale_dtype": jnp.float16}, jnp.float16),
    "blocks": ("blocks", 8, 2048, 2048, {}, jnp.bfloat16),
    "w8a8 fp8": ("e4m3, rounding", 5, 1024, 512, {}, jnp.bfloat16),
    "w8a8 int8, many rows": ("int8, rounding", 300, 1024, 512, {}, jnp.bfloat16),
    "many rows": ("int4 of 64", 512, 1024, 512, {"has_zeros": True}, jnp.float16),
}


@pytest.mark.parametrize(
    "case", [*list(CALLS)[:2], *(pytest.param(c, marks=pytest.mark.slow) for c in list(CALLS)[2:])]
)
def test_every_format_lowers_for_a_gpu(case):
    name, rows, depth, columns, options, dtype = CALLS[case]
    make = functools.partial(round_weight, form=FORMATS[name], **options)
    weight = jax.eval_shape(
        lambda x: arranged(make(x)), jax.ShapeDtypeStruct((depth, columns), jnp.float32)
    )
    x = jax.ShapeDtypeStruct((rows, depth), dtype)
    call = functools.partial(quantized_matmul, implementation="hopper", out_dtype=jnp.float32)
    with device.compiling_for(device.H200):
        lowered = jax.jit(call).trace(x, weight).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_tiles_fit_whatever_the_size():
    for M in (1, 9, 16, 17, 64, 65, 256):
        for depth, columns in ((128, 64), (4096, 6144), (14_336, 4096), (4096, 28_672)):
            for bits, group in ((4, 64), (8, 0)):
                shape = ProductShape(M=M, K=depth, N=columns, bits=bits, group_rows=group)
                chosen = config_for(shape)
                found = configs(shape)
                assert chosen in found or (depth == 128 and chosen is None)
                assert all(config.shared_bytes(shape) <= SMEM_BYTES for config in found)


def test_measured_tiles_are_taken_near_what_was_measured():
    up = ProductShape(M=16, K=4096, N=14_336, bits=4, group_rows=128, scale_bytes=2)
    with device.compiling_for(device.H200):
        assert measured_config(up) == QuantizedConfig(tiles=2, split=1, groups=2, stages=12)
        assert measured_config(dataclasses.replace(up, M=1)) != measured_config(up)
        between = dataclasses.replace(up, M=5)
        assert measured_config(between) == config_for(between)
    assert measured_config(up) is None  # of a CPU nothing was measured


def shapes_of(form, shape=(K, N)):
    """Of a weight's parts: what is refused is refused before anything is computed."""
    whole = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(functools.partial(round_weight, form=form), whole)


def rows_of(count: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((count, K), dtype)


def test_what_the_kernel_cannot_is_refused():
    weight = shapes_of(FORMATS["int8"])
    fitting = jax.eval_shape(arranged, weight)
    named = functools.partial(quantized_matmul, implementation="hopper")
    with pytest.raises(UnsupportedError, match="xla can"):
        jax.eval_shape(named, rows_of(2), fitting)
    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="lies in rows; give it arranged"):
            jax.eval_shape(named, rows_of(2), weight)
        with pytest.raises(UnsupportedError, match="float32"):
            jax.eval_shape(named, rows_of(2, jnp.float32), fitting)
    for form, shape, why in (
        (WeightFormat(code=WeightCode.NF4, group_rows=64), (K, N), "looked up"),
        (WeightFormat(code=WeightCode.INT4, group_rows=32), (K, N), "groups of 32"),
        (FORMATS["int8"], (K + 64, N), "320 rows"),
        (FORMATS["int8"], (K, 100), "100 columns"),
        (ROUNDING_GROUPS, (K, N), "scales along K"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            jax.eval_shape(arranged, shapes_of(form, shape))
    wide = dataclasses.replace(config_for(ProductShape.of(64, fitting)), tiles=4)
    call = functools.partial(quantized_matmul_hopper, out_dtype=jnp.dtype(jnp.float32), config=wide)
    with pytest.raises(UnsupportedError, match=r"columns|registers"):
        jax.eval_shape(call, rows_of(64), fitting)
