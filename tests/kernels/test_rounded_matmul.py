"""Products in e4m3 with a scale per row of the input: kernels in the interpreter, and lowered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, few_rows_matmul, quantized_matmul
from pallas_kernels.common import device
from pallas_kernels.common.row_inputs import RmsNorm, swiglu_of_halves
from pallas_kernels.few_rows_matmul.rounded import rounded_rows
from pallas_kernels.fp8.hopper_few_rows import FewRowsConfig, few_rows_config, few_rows_hopper
from pallas_kernels.fp8.hopper_many_rows import NARROW, many_rows_config, many_rows_hopper
from pallas_kernels.fp8.hopper_matmul import ScaledConfig, shared_memory_bytes
from pallas_kernels.fp8.hopper_round_rows import round_rows_hopper
from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.quantized_weight import (
    Activations,
    WeightCode,
    WeightFormat,
    arranged,
    round_weight,
)
from tests.rounding import Rounded
from tests.tolerance import assert_within_rounding

FORM = WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3)
SMALL_RING = ScaledConfig(num_stages=2, part_n=256, in_turns=False)
KERNELS = {
    "few rows": ((24, 128, 256), FewRowsConfig(groups=2, stages=2)),
    "few rows, split": ((16, 64, 512), FewRowsConfig(splits=2, stages=2)),
    "many rows": ((72, 320, 256), SMALL_RING),
    "many rows, narrow": (
        (72, 320, 256),
        dataclasses.replace(SMALL_RING, tile_n=NARROW, part_n=NARROW),
    ),
}
SHAPES = ((1, 4096, 6144), (64, 14336, 4096), (65, 4096, 28672), (1024, 4096, 4096))
"""Rows, depth and columns of an 8B model's products."""


def interpreted(f, *arrays):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return jax.jit(f)(*arrays)


@pytest.mark.slow_cases("many rows", "many rows, narrow")
@pytest.mark.parametrize("case", list(KERNELS))
def test_kernels_compute_the_formula(case):
    (M, N, K), config = KERNELS[case]
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(20 * rng.normal(size=(n, K)), jnp.float8_e4m3fn) for n in (M, N))
    a_scale, b_scale = (jnp.asarray(10.0 ** rng.uniform(-2, 2, n), jnp.float32) for n in (M, N))
    f = functools.partial(many_rows_hopper, out_dtype=jnp.dtype("float32"), config=config)
    if isinstance(config, FewRowsConfig):
        f = functools.partial(
            few_rows_hopper, out_dtype=jnp.dtype("float32"), config=config, interpretable=True
        )
    sides = [
        Rounded(np.asarray(x, np.float64)) * np.asarray(scale, np.float64)[:, None]
        for x, scale in ((a, a_scale), (b, b_scale))
    ]
    want = np.einsum("mk,nk->mn", *sides)
    got = interpreted(f, a, b, a_scale, b_scale)
    assert_within_rounding(got, want)
    with pytest.raises(AssertionError):
        assert_within_rounding(interpreted(f, a, b, jnp.roll(a_scale, 1), b_scale), want)


@pytest.mark.slow_cases("1536")
@pytest.mark.parametrize("columns", [256, 1536])
def test_rows_are_rounded_as_the_formula_says(columns):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 2 * columns)), jnp.bfloat16)
    norm = RmsNorm(scale=jnp.asarray(rng.normal(size=columns), jnp.float32), epsilon=1e-5)
    cases = ((x, None, True), (x[:, :columns], norm, False), (x[:, :columns], None, False))
    for given, norm, swiglu_input in cases:
        f = functools.partial(round_rows_hopper, norm=norm, swiglu_input=swiglu_input)
        codes, scale = interpreted(f, given)
        numbers = swiglu_of_halves(given) if swiglu_input else norm(given) if norm else given
        found = rounded_rows(numbers, Activations.E4M3)
        want, want_scale = (np.asarray(each, np.float32) for each in found)
        np.testing.assert_allclose(scale, want_scale[:, 0], rtol=2**-7)  # a step of bf16
        # The quotient may be rounded to the other side of a tie, one step of e4m3 away.
        error = np.abs(np.asarray(codes, np.float32) * want_scale - want * want_scale)
        assert (error <= 2**-3 * np.abs(want * want_scale) + 2**-9 * want_scale).all()
        assert (error == 0).mean() > 0.99


def test_products_round_their_input_alike_in_both_orders_of_the_weight():
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(3, 256)), jnp.float32)
    weight = round_weight(jnp.asarray(rng.normal(size=(256, 128)), jnp.float32), FORM)
    norm = RmsNorm(scale=jnp.ones(256), epsilon=1e-5)

    @jax.jit
    def products(weight):
        found = arranged(weight)
        normed = functools.partial(few_rows_matmul, x, norm=norm)
        return [(f(weight), f(found)) for f in (functools.partial(quantized_matmul, x), normed)]

    for want, got in products(weight):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def weight_shapes(K: int, N: int):
    whole = jax.ShapeDtypeStruct((K, N), jnp.float32)
    rounded = functools.partial(round_weight, form=FORM, scale_dtype=jnp.dtype(jnp.bfloat16))
    return jax.eval_shape(lambda x: arranged(rounded(x)), whole)


@pytest.mark.slow_cases("1x4096x6144", "65x4096x28672")  # of the kernels of the others
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_an_8b_models_products_lower_for_a_gpu(shape):
    M, K, N = shape
    x, residual = (jax.ShapeDtypeStruct((M, n), jnp.bfloat16) for n in (K, N))
    norm = RmsNorm(scale=jax.ShapeDtypeStruct((K,), jnp.bfloat16), epsilon=1e-5)
    call = functools.partial(few_rows_matmul, implementation="hopper")
    with device.compiling_for(device.H200):
        traced = jax.jit(call).trace(x, weight_shapes(K, N), norm=norm, residual=residual)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


def test_tiles_fit_and_use_the_processors():
    for M, K, N in SHAPES:
        if M <= 64:
            few = few_rows_config(M, N, K)
            stage = 128 * (64 * few.groups + M)
            assert few.stages * stage + 4 * M * 64 * few.groups < SMEM_BYTES
            assert N // (64 * few.groups) * few.splits >= 0.7 * NUM_PROCESSORS
        else:
            many = many_rows_config(M, N, K)
            assert shared_memory_bytes(many, columns_scaled=False) <= SMEM_BYTES
            assert -(-M // 128) * -(-N // 256) * many.splits >= 0.7 * NUM_PROCESSORS
    widths = {n: many_rows_config(1000, n, 4096).tile_n for n in (4096, 6144, 28672)}
    assert widths == {4096: 256, 6144: NARROW, 28672: 256}


def test_what_no_kernel_takes_is_refused():
    x = jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="xla can"):
        jax.eval_shape(
            functools.partial(quantized_matmul, implementation="hopper"), x, weight_shapes(256, 128)
        )

    def gradient(x, weight):
        return jax.grad(lambda x: quantized_matmul(x, weight).sum())(x)

    with pytest.raises(UnsupportedError, match="has no gradient: rounding has none"):
        jax.eval_shape(
            gradient, jax.ShapeDtypeStruct((2, 256), jnp.float32), weight_shapes(256, 128)
        )
