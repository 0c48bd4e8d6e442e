"""FP8 attention: its number format, the kernel in the interpreter, lowering, meshes, refusals."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import InputError, UnsupportedError, flash_attention_fp8, quantize_fp8
from pallas_kernels.common import device
from pallas_kernels.flash_attention import fp8, fp8_operands, hopper
from pallas_kernels.flash_attention.fp8_operands import KEYS_PER_SCALE
from pallas_kernels.flash_attention.hopper.config import Fp8Config
from pallas_kernels.flash_attention.spec import AttentionSpec
from tests.kernels import attention_oracle
from tests.tolerance import assert_no_worse

# Of a number rounded to 3 bits of mantissa the error is uniform within 2**-4 of it at most.
RMS_OF_ROUNDING = 2.0**-4 / 3**0.5
# In fp32, of scores of 100 whose difference from the maximum is exponentiated.
EIGHT_ROUNDINGS = 8 * 2.0**-24


def qkv(B=1, T=77, S=150, N=2, K=1, H=64, *, outliers=True):
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    ]
    if outliers:
        arrays[0][:, ::7] *= 20
        arrays[1][..., :3] *= 4
        arrays[2][:, :64] *= 0.01  # a block of small values beside large ones
    return [x.astype(jnp.bfloat16) for x in arrays]


quantized = jax.jit(quantize_fp8)


def attend(operands, **options):
    return jax.jit(functools.partial(flash_attention_fp8, **options))(operands)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_scales_are_those_of_their_blocks_and_rounding_is_to_nearest():
    q, k, v = (np.asarray(x, np.float64) for x in qkv(B=2, K=2, N=4))
    operands = quantized(*qkv(B=2, K=2, N=4))
    np.testing.assert_allclose(operands.q_scale, np.abs(q).max(axis=3) / 448, rtol=1e-6)
    for j in range(3):
        block = slice(64 * j, 64 * (j + 1))
        for x, scale in ((k, operands.k_scale), (v, operands.v_scale)):
            largest = np.abs(x[:, block]).max(axis=(1, 3))
            np.testing.assert_allclose(scale[:, j], largest / 448, rtol=1e-6)
    back = jax.jit(fp8_operands.dequantized)(operands)
    scales = (
        np.asarray(operands.q_scale)[..., None],
        *(
            np.repeat(scale, KEYS_PER_SCALE, axis=1)[:, :150, :, None]
            for scale in (operands.k_scale, operands.v_scale)
        ),
    )
    for got, want, scale in zip(back, (q, k, v), scales, strict=True):
        assert got.shape == want.shape
        half_ulp = np.maximum(2.0**-4 * np.abs(want), 2.0**-10 * scale)
        assert (np.abs(np.asarray(got, np.float64) - want) <= half_ulp * (1 + 1e-6)).all()


def test_order_of_the_values_is_that_of_the_registers():
    keys = np.arange(48)
    order = np.asarray(fp8_operands.ordered(jnp.asarray(keys)))
    for position, key in enumerate(order):
        group, t, e = position // 16, position % 16 // 4, position % 4
        assert key == 16 * group + (2 * t + e if e < 2 else 8 + 2 * t + e - 2)
    np.testing.assert_array_equal(fp8_operands.natural(jnp.asarray(order)), keys)


def test_zeros_and_lengths_of_zero():
    q, k, v = (np.zeros_like(x) for x in qkv())
    out, lse = jax.device_get(attend(quantized(q, k, v), return_residual=True))
    assert not out.any()
    np.testing.assert_allclose(lse, np.log(150), rtol=1e-6)
    operands = quantized(q, k[:, :0], v[:, :0])
    out, lse = jax.device_get(attend(operands, return_residual=True))
    assert not out.any()
    assert np.isneginf(lse).all()


def test_portable_is_the_reference_of_the_dequantized():
    operands = quantized(*qkv(B=2, N=4, K=2))
    for options in ({}, {"is_causal": True, "local_window_size": (40, 0)}):
        got, want = (
            attend(operands, **options, implementation=name, return_residual=True, dtype="float32")
            for name in ("xla", "reference")
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def oracle(q, k, v, *, left=None, right=None):
    (B, T, _, H), S = q.shape, k.shape[1]
    seen = attention_oracle.visible(
        B, T, S, left=left, right=right, q_ids=None, kv_ids=None, q_lengths=None, kv_lengths=None
    )
    zeros = np.zeros((*q.shape[:3], v.shape[3])), np.zeros(q.shape[:3])
    result = attention_oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)), *zeros, seen,
        scale=H**-0.5,
    )  # fmt: skip
    return {name: result[name] for name in ("out", "lse")}


QUICK = {
    "full": ({}, {}, {"block_kv": 128}),
    "causal, two queries a key": ({"N": 2}, {"right": 0}, {"block_kv": 64}),
}
THOROUGH = {
    "d128 causal": ({"H": 128, "T": 200, "S": 200}, {"right": 0}, {"block_kv": 128}),
    "more queries": ({"T": 150, "S": 77}, {"right": 0}, {"block_kv": 64}),
    "window": ({"T": 200, "S": 200}, {"right": 0, "left": 30}, {"block_kv": 64}),
    "batch and heads": ({"B": 2, "N": 4, "K": 2}, {}, {"block_kv": 192}),
    "half blocks": ({}, {}, {"block_kv": 96}),
    "one tile": ({"S": 40}, {}, {"block_kv": 128}),
}
RUNS = [
    *(pytest.param(*case, id=name) for name, case in QUICK.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in THOROUGH.items()),
]


@pytest.mark.parametrize(("shape", "bounds", "tiles"), RUNS)
def test_kernel_in_the_interpreter(shape, bounds, tiles):
    q, k, v = qkv(**shape)
    operands = quantized(q, k, v)
    spec = AttentionSpec(scale=q.shape[3] ** -0.5, **bounds)
    f = functools.partial(
        hopper.forward_fp8, spec=spec, dtype=jnp.bfloat16, interpretable=True,
        config=Fp8Config(**tiles),
    )  # fmt: skip
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out, lse = jax.jit(f)(operands)
    plain = attend(
        operands, is_causal="right" in bounds, local_window_size=(bounds.get("left"), None),
        implementation="reference", return_residual=True,
    )  # fmt: skip
    # The logsumexp is of the same scores; the output has one rounding more, of the probabilities.
    seen = np.isfinite(np.asarray(plain[1]))
    np.testing.assert_allclose(
        np.asarray(lse)[seen], np.asarray(plain[1])[seen], atol=2e-5, rtol=EIGHT_ROUNDINGS
    )
    assert np.isneginf(np.asarray(lse)[~seen]).all()
    assert not np.asarray(out, np.float32)[~seen].any()
    assert relative(out, plain[0]) < RMS_OF_ROUNDING
    got, rough = ({"out": x[0], "lse": x[1]} for x in ((out, lse), plain))
    assert_no_worse(got, plain=rough, oracle=oracle(q, k, v, **bounds), what="fp8")


def shapes(H, T=2048, B=2, N=8, K=2):
    struct = jax.ShapeDtypeStruct
    q, k = struct((B, T, N, H), jnp.bfloat16), struct((B, T, K, H), jnp.bfloat16)
    return jax.eval_shape(quantize_fp8, q, k, k)


# The wider of two, with a mask and a tile that is not whole.
LOWERED = [(128, 1999, {"is_causal": True})]
OTHERS = [(64, 2048, {"local_window_size": (99, 0)}), (128, 1999, {"local_window_size": (99, 0)}),
          (64, 2048, {}), (128, 2048, {}), (64, 1999, {"is_causal": True}), (128, 300, {}),
          (64, 300, {}), (64, 40, {})]  # fmt: skip


@pytest.mark.parametrize(
    ("H", "T", "options"),
    [*LOWERED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_kernel_lowers_to_cuda(H, T, options):
    f = functools.partial(flash_attention_fp8, implementation="hopper", **options)
    with device.compiling_for(device.H200):
        text = jax.jit(f).trace(shapes(H, T)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("H", "choice"), [(128, "hopper for e4m3 b2 t2048"), (96, "xla for e4m3 .*not hopper: .*96/96")]
)
def test_auto_takes_the_kernel_where_it_can_and_says_so(H, choice, caplog):
    caplog.set_level(logging.INFO, logger="pallas_kernels")
    with device.compiling_for(device.H200):
        text = str(jax.make_jaxpr(flash_attention_fp8)(shapes(H)))
    assert ("mpmd_map" in text) == choice.startswith("hopper")
    assert re.search(f"uses {choice}", caplog.records[0].getMessage())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda o: flash_attention_fp8(o, implementation="cudnn"), InputError, "auto or hopper"),
        (lambda o: flash_attention_fp8(o, dtype="int8"), InputError, "dtype=int8"),
        (
            lambda o: flash_attention_fp8(o, implementation="hopper"),
            UnsupportedError,
            r"9\.0 \(Hopper\), not cpu.*These can: xla",
        ),
        (
            lambda o: jax.grad(
                lambda s: flash_attention_fp8(
                    dataclasses.replace(o, q_scale=s), dtype="float32"
                ).sum()
            )(o.q_scale),
            UnsupportedError,
            "no gradient: train with flash_attention",
        ),
        (
            lambda o: flash_attention_fp8(dataclasses.replace(o, v_scale=o.v_scale[:, :1])),
            InputError,
            r"v_scale is \(1, 1, 1\) and must be \(1, 3, 1\).*quantize_fp8",
        ),
        (
            lambda o: flash_attention_fp8(dataclasses.replace(o, k=o.k.astype(jnp.bfloat16))),
            InputError,
            "k is bfloat16.*quantize_fp8",
        ),
    ],
    ids=["name", "dtype", "device", "gradient", "scales", "not e4m3"],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call(jax.device_get(quantized(*qkv())))


@pytest.mark.parametrize(
    ("H", "config", "scale", "words"),
    [
        (96, None, 1.0, "96/96"),
        (128, None, -1.0, "scale=-1.0"),
        (128, Fp8Config(block_kv=192, num_stages=6), 1.0, r"bytes of shared memory.*232448"),
        (128, Fp8Config(block_kv=80), 1.0, "block_kv=80 is no multiple of 32"),
    ],
    ids=["width", "scale", "shared memory", "tile"],
)
def test_kernel_refuses_before_the_compiler(H, config, scale, words):
    f = functools.partial(
        hopper.forward_fp8, spec=AttentionSpec(scale=scale), dtype=jnp.bfloat16, config=config
    )
    with pytest.raises(UnsupportedError, match=words):
        jax.eval_shape(f, shapes(H))


@pytest.fixture
def stand_in(monkeypatch):
    """Where the kernel would run: a custom call to JAX, computed by the reference."""
    seen = []

    def compute(operands, *, spec, dtype):
        seen.append(operands.q.shape)
        args = *fp8_operands.dequantized(operands), fp8.AttentionMasks()
        out, lse = fp8.reference.forward(*args, spec=spec)
        return out.astype(dtype), lse

    monkeypatch.setattr(hopper, "forward_fp8", compute)
    with device.compiling_for(device.H200):
        yield seen


def test_sharded_over_batch_and_heads_without_a_gather(stand_in):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    operands = quantized(*qkv(B=4, N=8, K=4))
    P = PartitionSpec
    layout = fp8_operands.Fp8Operands(
        q=P("data", None, "tensor"), q_scale=P("data", None, "tensor"),
        k=P("data", None, "tensor"), k_scale=P("data", None, "tensor"),
        v_t=P("data", "tensor"), v_scale=P("data", None, "tensor"),
    )  # fmt: skip
    place = functools.partial(NamedSharding, mesh)
    placed = jax.device_put(operands, jax.tree.map(place, layout))
    f = functools.partial(flash_attention_fp8, is_causal=True, implementation="hopper")
    compiled = jax.jit(f).lower(placed).compile()
    assert not re.search(r"all-gather|all-reduce|all-to-all", compiled.as_text())
    assert stand_in[-1][0] == 2
    assert stand_in[-1][2] == 2
    want = attend(operands, is_causal=True, implementation="reference")
    assert relative(compiled(placed), want) < 1e-3


def test_vmap(stand_in):
    operands = jax.device_get(quantized(*qkv(B=6)))
    grouped = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), operands)
    mapped = jax.vmap(functools.partial(flash_attention_fp8, implementation="hopper"))
    got = jax.device_get(jax.jit(mapped)(grouped))
    want = attend(operands, implementation="reference")
    assert stand_in[-1][0] == 6
    assert relative(got.reshape(want.shape), want) < 1e-3
