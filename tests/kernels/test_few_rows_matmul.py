"""Products of few rows without a GPU: formula, kernels in the interpreter, choice, refusals.

``test_resident_rows`` and ``test_few_rows_stage`` run what threads of the kernels do.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.bench.kernels.few_rows_matmul import case_of
from pallas_kernels import InputError, UnsupportedError, few_rows_matmul, quantized_matmul
from pallas_kernels.common import device, tables
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.few_rows_matmul import choice
from pallas_kernels.few_rows_matmul.choice import (
    fused_config,
    product_config,
)
from pallas_kernels.few_rows_matmul.config import (
    FusedConfig,
    ProductShape,
    QuantizedConfig,
    SkinnyConfig,
    default_fused,
    default_quantized,
    default_skinny,
    fused_configs,
    quantized_configs,
)
from pallas_kernels.few_rows_matmul.hopper import product_hopper
from pallas_kernels.few_rows_matmul.reference import FewRowsCall
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.quantized_weight import arranged, round_weight
from tests.kernels.few_rows_cases import FORMATS, OPTIONS, exact, operands
from tests.tolerance import assert_within_rounding

STATIC = ("swiglu", "swiglu_input", "implementation")
computed = jax.jit(few_rows_matmul, static_argnames=STATIC)
SKINNY = {
    "few rows": ((5, 256, 64), False, SkinnyConfig()),
    "gated, two groups": ((72, 256, 128), True, SkinnyConfig()),
    "parts of K": ((24, 512, 64), False, SkinnyConfig(splits=4)),
    "transposed, gated": ((48, 256, 256), True, SkinnyConfig(tile_n=128, transposed=True)),
    "transposed, parts of K": (
        (32, 512, 128),
        False,
        SkinnyConfig(tile_n=128, splits=4, transposed=True),
    ),
    "deep, narrow": ((16, 384, 32), False, SkinnyConfig(tile_n=32, depth=128)),
}
BF16 = jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize("case", list(OPTIONS))
def test_xla_computes_the_formula(case):
    x, w, given = operands(3, 100, 34, OPTIONS[case])
    true = exact(x, w, given, is_apart=True)
    assert_within_rounding(computed(x, w, **given), true)
    # A norm's epsilon, a residual, or gates and ups, are no rounding.
    wrong = dict(given)
    if "residual" in given:
        del wrong["residual"]
    elif "norm" in given:
        wrong["norm"] = dataclasses.replace(given["norm"], epsilon=0.3)
    else:
        w = np.roll(w, 1, axis=0)
    with pytest.raises(AssertionError):
        assert_within_rounding(computed(x, w, **wrong), true)


@pytest.mark.slow_cases(
    "few rows", "parts of K", "deep, narrow", "transposed, gated", "transposed, parts of K"
)
@pytest.mark.parametrize("case", list(SKINNY))
def test_skinny_kernel_in_the_interpreter(case):
    shape, swiglu, config = SKINNY[case]
    x, w, _ = operands(*shape, {})
    f = functools.partial(product_hopper, config=config, out_dtype=BF16, swiglu=swiglu)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(f)(x, w)
    true = exact(x, w, {"swiglu": swiglu})
    assert_within_rounding(got, true)
    # A tile too few is no rounding.
    x[:, -64:] = 0
    with pytest.raises(AssertionError):
        assert_within_rounding(computed(x, w, swiglu=swiglu), true)


DOWN = 14_336, 4096


def in_16_bits() -> Any:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, DOWN[0]), DOWN))
    return jax.make_jaxpr(functools.partial(few_rows_matmul, implementation="fused"))(x, w)


def quantized(rows: int) -> Any:
    whole = jax.ShapeDtypeStruct(DOWN, jnp.float32)
    weight = jax.eval_shape(lambda w: arranged(round_weight(w, FORMATS["int4"])), whole)
    x = jax.ShapeDtypeStruct((rows, DOWN[0]), jnp.bfloat16)
    return jax.make_jaxpr(functools.partial(quantized_matmul, implementation="hopper"))(x, weight)


KERNELS: dict[str, Callable[[], Any]] = {
    "16 bits": in_16_bits,
    "quantized": functools.partial(quantized, 1),
    "quantized, x in stages": functools.partial(quantized, 16),
}


def equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """All, whatever they are in."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(part)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_no_request_is_without_a_wait(kernel):
    """``hopper.ring`` has the reason; ``test_few_rows_matmul_gpu`` has the size that went wrong."""
    with device.compiling_for(device.H200):
        traced = KERNELS[kernel]()
    found = 0
    for loop in equations(traced.jaxpr):
        if loop.primitive.name not in ("scan", "while"):
            continue
        (*_, body) = jax.extend.core.jaxprs_in_params(loop.params)
        names = [each.primitive.name for each in equations(body)]
        if "copy_gmem_to_smem" in names:
            found += 1
            assert names.index("barrier_wait") < names.index("copy_gmem_to_smem")
            assert "cond" not in names
    assert found == 1


@pytest.mark.parametrize(
    ("shape", "swiglu", "implementation"),
    [
        ((1, 4096, 6144), False, "hopper"),
        ((128, 4096, 28_672), True, "hopper"),
        ((256, 2048, 2048), False, "hopper"),
        pytest.param((1, 2048, 16_384), True, "fused", marks=pytest.mark.slow),
    ],
    ids=["one row", "gated", "most rows", "fused"],
)
def test_shapes_of_models_lower_for_a_gpu(shape, swiglu, implementation):
    M, K, N = shape
    x, w, scale = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, K), (K, N), (K,)))
    norm = RmsNorm(scale=scale, epsilon=1e-5)
    f = functools.partial(few_rows_matmul, swiglu=swiglu, implementation=implementation)
    with device.compiling_for(device.H200):
        traced = jax.jit(lambda x, w, norm: f(x, w, norm=norm)).trace(x, w, norm)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


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
    for K, N in ((128, 64), (2048, 3072), (4096, 28_672), (14_336, 4096), (28_672, 8192)):
        for M, swiglu in (
            (1, False),
            (8, True),
            (24, False),
            (64, True),
            (136, False),
            (256, True),
        ):
            s = ProductShape(M=M, K=K, N=N, swiglu=swiglu)
            for fused in fused_configs(s):
                ring = fused.num_stages(s) * fused.stage_bytes
                assert ring + 16 * K // fused.split < SMEM_BYTES
                assert fused.num_stages(s) >= min(2, fused.steps(s))
            skinny = default_skinny(s)
            assert skinny is not None or swiglu
            if skinny is not None:
                assert skinny.num_stages(s) >= 2
                assert skinny.num_stages(s) * skinny.stage_bytes(s) < SMEM_BYTES
        for M in (1, 9, 16, 17, 64, 65, 256):
            for bits, group in ((4, 64), (8, 0)):
                s = ProductShape(M=M, K=K, N=N, bits=bits, group_rows=group)
                found = quantized_configs(s)
                assert default_quantized(s) in found or (K == 128 and not found)
                assert all(config.shared_bytes(s) <= SMEM_BYTES for config in found)
    down = ProductShape(M=1, K=14_336, N=4096)
    chosen = default_fused(down)
    assert chosen is not None
    assert chosen.num_blocks(down) >= 100  # most multiprocessors have one
    assert default_fused(ProductShape(M=1, K=128, N=100)) is None


def test_auto_takes_what_was_measured_to_be_faster():
    up = ProductShape(M=16, K=4096, N=14_336, bits=4, group_rows=128, scale_bytes=2)
    out = ProductShape(M=256, K=4096, N=4096)
    wide = QuantizedConfig(tiles=2, split=1, groups=2, stages=12)
    assert product_config(up) is None  # on a CPU nothing was measured
    with device.compiling_for(device.H200):
        gated = ProductShape(M=128, K=4096, N=28_672, swiglu=True)
        assert product_config(gated) == SkinnyConfig(tile_n=256)
        down = ProductShape(M=64, K=14_336, N=4096)
        assert product_config(down) == SkinnyConfig(depth=128, splits=2)
        assert product_config(out) == SkinnyConfig(splits=2, transposed=True)
        # Rows that do not divide by 16 go as the next best does.
        some = dataclasses.replace(out, M=200)
        assert product_config(some) == SkinnyConfig(splits=2)
        # With 128 rows XLA is as fast; so far from a measured size nothing is known.
        assert product_config(dataclasses.replace(down, M=128)) is None
        assert product_config(ProductShape(M=64, K=512, N=512)) is None
        assert product_config(up) == wide
        assert product_config(dataclasses.replace(up, M=1)) != wide
        between = dataclasses.replace(up, M=5)
        assert product_config(between) == default_quantized(between)


FUSED, QUANTIZED = FusedConfig(tiles=2, split=2), QuantizedConfig(split=2, groups=4, stages=8)


@pytest.fixture
def measured(monkeypatch):
    """Calls of which a table says that a kernel takes a tenth of the time."""
    x, w, given = operands(1, 256, 512, OPTIONS["norm"])
    weights = jnp.asarray(w), arranged(round_weight(jnp.asarray(w), FORMATS["int4 of 64"]))
    calls = [FewRowsCall(x=jnp.asarray(x), weight=each, **given) for each in weights]
    rows = [
        tables.Row.of(case=case_of(call, True), choice={"implementation": name, **tiles}, ms=ms)
        for call, config in zip(calls, (FUSED, QUANTIZED), strict=True)
        for name, tiles, ms in (("apart", {}, 1.0), ("fused", dataclasses.asdict(config), 0.1))
    ]
    monkeypatch.setattr(tables, "find", lambda folder, question: tuple(rows))
    kept = choice._fused, choice._quantized, choice._skinny
    for each in kept:
        each.cache_clear()
    with device.compiling_for(device.H200):
        yield calls
    for each in kept:
        each.cache_clear()


@pytest.mark.parametrize(("which", "config"), [(0, FUSED), (1, QUANTIZED)])
def test_auto_fuses_what_the_table_says(measured, which, config):
    call = measured[which]
    assert fused_config(call) == config
    computed = jax.make_jaxpr(functools.partial(few_rows_matmul, norm=call.norm))

    def norms_apart(x: jax.Array, weight: Any) -> bool:
        return "rsqrt" in str(computed(x, weight)).partition("mpmd_map")[0]

    assert not norms_apart(call.x, call.weight)
    # Nine rows are beyond the kernels; another format, or a residual, was not measured.
    assert norms_apart(jnp.zeros((9, 256), jnp.bfloat16), call.weight)
    int8 = arranged(round_weight(jnp.ones((256, 512)), FORMATS["int8"]))
    assert norms_apart(call.x, int8)
    added = dataclasses.replace(call, residual=jnp.ones((1, 512), jnp.bfloat16))
    assert fused_config(added) is None


def test_what_does_not_fit_is_refused():
    x, w, given = operands(4, 128, 64, OPTIONS["norm"])
    with pytest.raises(InputError, match="must be"):
        few_rows_matmul(x, w, swiglu_input=True)
    with pytest.raises(InputError, match="of x's bfloat16"):
        few_rows_matmul(x, w.astype(np.float32))
    with pytest.raises(InputError, match="not \\[64\\]"):
        few_rows_matmul(x[:, :64], w[:64], **given)
    with pytest.raises(InputError, match="normalized"):
        few_rows_matmul(np.tile(x, 2), w, swiglu_input=True, **given)
    with pytest.raises(InputError, match="residual is"):
        few_rows_matmul(x, w, residual=x)
    with pytest.raises(InputError, match="half of them"):
        few_rows_matmul(x, w[:, :63], swiglu=True)
    with pytest.raises(InputError, match="triton"):
        few_rows_matmul(x, w, implementation="triton")  # pyrefly: ignore[bad-argument-type]
    for name in ("fused", "hopper"):
        with pytest.raises(UnsupportedError, match="xla can"):
            few_rows_matmul(x, w, implementation=name)
    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="1 to 8"):
            few_rows_matmul(np.tile(x, (3, 1)), w, implementation="fused")
        with pytest.raises(UnsupportedError, match="K=100"):
            few_rows_matmul(x[:, :100], w[:100], implementation="hopper")
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(lambda x: jnp.sum(few_rows_matmul(x, w).astype(jnp.float32)))(x)
    assert "registers" in str(
        SkinnyConfig(tile_n=256).unsupported(ProductShape(M=200, K=128, N=256))
    )
    few = ProductShape(M=64, K=256, N=512, bits=8)
    assert "registers" in str(QuantizedConfig(tiles=4, split=1, groups=1).unsupported(few))
