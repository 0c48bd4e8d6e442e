"""Heads of a packed product into pages: the kernel in the interpreter, lowering, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError, append_heads
from pallas_kernels.common import device
from pallas_kernels.paged_attention import numbers_of
from pallas_kernels.paged_attention.hopper import append_heads_hopper
from pallas_kernels.quantized_weight import WeightCode
from tests.rounding import Rounded
from tests.tolerance import assert_within_rounding

F32 = jnp.dtype(jnp.float32)


def operands(B=3, T=2, N=8, K=4, H=64, dtype="bfloat16"):
    """A row over the edge of a page, one into a page that it does not have, one of padding."""
    rng = np.random.default_rng(0)
    heads = jnp.asarray(rng.normal(size=(B, T, N + 2 * K, H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(7, 16, K, H)), dtype) for _ in range(2))
    tables = np.array([[1, 2], [3, -1], [4, 5]], np.int32)
    positions = np.array([[15, 16], [9, 20], [31, -1]], np.int32)[:, -T:]
    angles = rng.uniform(0, 6, (B, T, H // 2)).astype(np.float32)
    return heads, k, v, tables, positions, (np.cos(angles), np.sin(angles))


def definition(heads, k, v, tables, positions, rope):
    """Queries and pools by loops over tokens; queries of padding are left out."""
    num_kv, size = k.shape[2], k.shape[1]
    num_q = heads.shape[2] - 2 * num_kv
    heads, want_k, want_v = (np.asarray(x, np.float64) for x in (heads, k, v))
    half = heads.shape[3] // 2
    first, second = Rounded(heads[..., :half]), Rounded(heads[..., half:])
    cos, sin = (Rounded(np.asarray(x, np.float64)[:, :, None]) for x in rope)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    want_k = Rounded(want_k)
    for row, token in np.ndindex(*positions.shape):
        place, slot = divmod(int(positions[row, token]), size)
        if positions[row, token] >= 0 and tables[row, place] >= 0:
            want_k[tables[row, place], slot] = turned[row, token, num_q : num_q + num_kv]
            want_v[tables[row, place], slot] = heads[row, token, num_q + num_kv :]
    return turned[:, :, :num_q], want_k, want_v


def by_kernel(heads, k, v, *rest, code=None, **scales):
    return append_heads_hopper(heads, {"k": k, "v": v} | scales, *rest, code=code)


def coded_pools(code, num_kv=4, width=64):
    """Pools of zeros, and scales of ones."""
    shape = (7, 16, num_kv, width * code.bits // 8)
    scales = {name: jnp.ones(shape[:3], jnp.bfloat16) for name in ("k_scale", "v_scale")}
    return jnp.zeros(shape, code.storage), scales


@pytest.mark.parametrize("form", ["xla", "kernel"])
def test_heads_go_where_the_tables_say(form):
    arguments = operands()
    if form == "kernel":
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            q, k, v = jax.jit(by_kernel)(*arguments)
    else:
        q, k, v = jax.jit(functools.partial(append_heads, implementation="xla"))(*arguments)
    want_q, want_k, want_v = definition(*arguments)
    is_there = arguments[4] >= 0
    assert_within_rounding(q[is_there], want_q[is_there])
    assert_within_rounding(k, want_k)
    np.testing.assert_array_equal(np.asarray(v, np.float64), want_v)
    # A slot too far, or keys that are not turned, are no rounding.
    wrong = definition(*arguments[:4], arguments[4] - 1, arguments[5])
    with pytest.raises(AssertionError):
        assert_within_rounding(k, wrong[1])
    cos, sin = arguments[5]
    with pytest.raises(AssertionError):
        assert_within_rounding(k, definition(*arguments[:5], (cos, -sin))[1])


@pytest.mark.slow_cases("e4m3")
@pytest.mark.parametrize("code", [WeightCode.E4M3, WeightCode.INT4])
def test_heads_go_into_pages_in_few_bits(code):
    """Of e4m3 a step is an eighth of an element's power of two, else a part of the largest."""
    heads, k, v, *rest = operands()
    pool, scales = coded_pools(code)
    append = jax.jit(functools.partial(append_heads, implementation="xla"))
    q, *found = append(heads, pool, pool, *rest, **scales)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        kernel = jax.jit(functools.partial(by_kernel, code=code))
        again = kernel(heads, pool, pool, *rest, **scales)
    for mine, true in zip(again[1:], found, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (mine, true)))
    want_q, want_k, want_v = definition(heads, 0 * k, 0 * v, *rest)
    is_there = rest[1] >= 0
    assert_within_rounding(q[is_there], want_q[is_there])
    for codes, scale, want in ((found[0], found[2], want_k.value), (found[1], found[3], want_v)):
        got = np.asarray(jax.jit(numbers_of, static_argnums=(2, 3))(codes, scale, code, F32))
        largest = np.abs(want).max(-1, keepdims=True)
        step = np.abs(want) / 8 if code is WeightCode.E4M3 else largest / 7
        written = largest[..., 0] > 0
        bound = 0.51 * step + 2.0**-8 * np.abs(want) + 2.0**-9 * largest
        assert written.sum() == 4 * 4
        assert (np.abs(got - want) <= bound)[written].all()
        assert not np.asarray(codes)[~written].astype(np.float32).any()
        assert (np.asarray(scale)[~written] == 1).all()


@pytest.mark.parametrize("case", [{"H": 64}, {"H": 128, "N": 32, "K": 8}, {"H": 256}], ids=str)
def test_pools_are_written_in_place(case):
    with device.compiling_for(device.H200):
        traced = jax.jit(append_heads, donate_argnums=(1, 2)).trace(*operands(**case))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 2
    assert "scatter" not in text


@pytest.mark.slow_cases("int8")
@pytest.mark.parametrize("code", [WeightCode.E4M3, WeightCode.INT8])
def test_pools_in_few_bits_are_written_in_place(code):
    heads, _, _, *rest = operands(H=128, N=32, K=8)
    pool, scales = coded_pools(code, num_kv=8, width=128)
    with device.compiling_for(device.H200):
        traced = jax.jit(append_heads).trace(heads, pool, pool, *rest, **scales)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert text.count("output_operand_alias<") == 4
    assert "scatter" not in text


def test_what_does_not_fit_is_refused():
    heads, k, v, *rest = operands()
    with pytest.raises(InputError, match="go into pools"):
        append_heads(heads[:, :, :8], k, v, *rest)
    with pytest.raises(InputError, match="k_scale and v_scale come together"):
        append_heads(heads, k, v, *rest, k_scale=k[..., 0])
    pool, scales = coded_pools(WeightCode.INT8)
    with pytest.raises(InputError, match="ask for floats"):
        append_heads(heads, pool, pool, *rest, **scales | {"v_scale": v})
    tables, positions, rope = rest
    with pytest.raises(InputError, match=r"positions are \[B, T\]"):
        append_heads(heads, k, v, tables, positions.T, rope)
    with pytest.raises(InputError, match=r"tables \[B, M\]"):
        append_heads(heads, k, v, tables[:2], positions, rope)
    with pytest.raises(InputError, match="triton"):
        append_heads(heads, k, v, *rest, implementation="triton")  # pyrefly: ignore[bad-argument-type]
    hopper = functools.partial(append_heads, implementation="hopper")
    with pytest.raises(UnsupportedError, match="Hopper"):
        hopper(heads, k, v, *rest)
    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="multiples of 4"):
            hopper(heads[:, :, :12], k[:, :, :2], v[:, :, :2], *rest)
        half = tuple(x[..., :16] for x in rest[-1])
        with pytest.raises(UnsupportedError, match="all must"):
            hopper(heads, k, v, *rest[:-1], half)
        with pytest.raises(UnsupportedError, match="not one of"):
            hopper(heads.astype(jnp.float32), k, v, *rest)
